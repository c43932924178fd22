// Rows of KV from one type of number to another, or as they are: one pass over memory. kvstore/layout_convert.py is the
// definition. What is computed stays in the innermost cache until it is stored, past the caches when there is much of it:
// nobody reads it soon, and memory need not be read to be overwritten.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBufferBytes = 16 << 10;
constexpr int64_t kStreamBytes = 128 << 10;  // from here on stores go past the caches
constexpr int64_t kScaleBytes = 4;

enum Type : int64_t { kFloat32, kBFloat16, kInt8 };

int64_t row_bytes(int64_t type, int64_t dim) {
    return type == kFloat32 ? 4 * dim : type == kBFloat16 ? 2 * dim : dim + kScaleBytes;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

float widened(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    return float_of((uint32_t)half << 16);
}

// To the nearest, ties to even; what is no number stays none.
uint16_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return value == value ? rounded : bits >> 16 | 0x40;
}

// Both go by way of float32, row by row, without leaving registers or the innermost cache.
void widen(const uint8_t *row, int64_t dim, int64_t type, float *wide) {
    if (type == kFloat32) {
        memcpy(wide, row, 4 * dim);
    } else if (type == kBFloat16) {
        for (int64_t i = 0; i < dim; ++i) wide[i] = widened(row + 2 * i);
    } else {
        float scale;
        memcpy(&scale, row + dim, 4);
        const int8_t *steps = reinterpret_cast<const int8_t *>(row);
        for (int64_t i = 0; i < dim; ++i) wide[i] = steps[i] * scale;
    }
}

void narrow(const float *wide, int64_t dim, int64_t type, uint8_t *row) {
    if (type == kFloat32) {
        memcpy(row, wide, 4 * dim);
    } else if (type == kBFloat16) {
        uint16_t *halves = reinterpret_cast<uint16_t *>(row);
        for (int64_t i = 0; i < dim; ++i) halves[i] = to_bfloat16(wide[i]);
    } else {
        // The least scale of 16 significant bits that brings the row into the range of int8. Sizes of numbers are in the
        // order of their bits.
        uint32_t largest = 0;
        for (int64_t i = 0; i < dim; ++i) largest = std::max(largest, bits_of(wide[i]) & 0x7FFFFFFF);
        const float scale = float_of((bits_of(float_of(largest) / 127.0f) + 0xFF) & 0xFFFFFF00);
        const float unit = scale > 0 ? scale : 1.0f;
        int8_t *steps = reinterpret_cast<int8_t *>(row);
        for (int64_t i = 0; i < dim; ++i) steps[i] = (int8_t)(int32_t)std::nearbyint(wide[i] / unit);
        memcpy(row + dim, &scale, 4);
    }
}

// Rows behind one another.
void convert_rows(const uint8_t *source, int64_t from, uint8_t *target, int64_t to, int64_t dim, int64_t count, float *wide) {
    if (from == kBFloat16 && to == kFloat32) {
        float *values = reinterpret_cast<float *>(target);
        for (int64_t i = 0; i < dim * count; ++i) values[i] = widened(source + 2 * i);
        return;
    }
    const int64_t source_bytes = row_bytes(from, dim), target_bytes = row_bytes(to, dim);
    for (int64_t i = 0; i < count; ++i) {
        widen(source + i * source_bytes, dim, from, wide);
        narrow(wide, dim, to, target + i * target_bytes);
    }
}

void stream(uint8_t *to, const uint8_t *from, int64_t bytes) {
#if defined(__AVX512F__)
    constexpr int64_t kVector = 64;
#elif defined(__AVX2__)
    constexpr int64_t kVector = 32;
#endif
#if defined(__AVX2__)
    const int64_t first = std::min<int64_t>(-(uintptr_t)to & (kVector - 1), bytes);
    memcpy(to, from, first);
    int64_t at = first;
    for (; at + kVector <= bytes; at += kVector) {
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to + at), _mm512_loadu_si512(from + at));
#else
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to + at),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + at)));
#endif
    }
    memcpy(to + at, from + at, bytes - at);
#else
    memcpy(to, from, bytes);
#endif
}

void store(uint8_t *to, const uint8_t *from, int64_t bytes, bool past_caches) {
    past_caches ? stream(to, from, bytes) : (void)memcpy(to, from, bytes);
}

}  // namespace

extern "C" {

// `shape` of source and target: layers, 2, heads, tokens; strides in bytes of the first three axes of each. Tokens lie
// behind one another.
void convert(const uint8_t *source, int64_t from, uint8_t *target, int64_t to, int64_t dim, const int64_t *shape,
             const int64_t *source_strides, const int64_t *target_strides) {
    alignas(64) uint8_t buffer[kBufferBytes];
    alignas(64) float wide[kBufferBytes / 4];
    const int64_t tokens = shape[3], source_bytes = row_bytes(from, dim), target_bytes = row_bytes(to, dim);
    const bool past_caches = shape[0] * shape[1] * shape[2] * tokens * target_bytes >= kStreamBytes;
    const int64_t rows_at_once = std::max<int64_t>(1, kBufferBytes / target_bytes);
    for (int64_t layer = 0; layer < shape[0]; ++layer)
        for (int64_t kind = 0; kind < shape[1]; ++kind)
            for (int64_t head = 0; head < shape[2]; ++head) {
                const uint8_t *in =
                    source + layer * source_strides[0] + kind * source_strides[1] + head * source_strides[2];
                uint8_t *out = target + layer * target_strides[0] + kind * target_strides[1] + head * target_strides[2];
                if (from == to) {
                    store(out, in, tokens * target_bytes, past_caches);
                    continue;
                }
                for (int64_t token = 0; token < tokens; token += rows_at_once) {
                    const int64_t count = std::min(rows_at_once, tokens - token);
                    convert_rows(in + token * source_bytes, from, buffer, to, dim, count, wide);
                    store(out + token * target_bytes, buffer, count * target_bytes, past_caches);
                }
            }
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

int64_t max_dim() { return kBufferBytes / 4; }
}
