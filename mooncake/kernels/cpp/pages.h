// One layer of the paged cache in place: rows of float32, bfloat16, or int8 codes followed by their scale.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace mooncake {

enum PageKind : int32_t { PAGES_F32 = 0, PAGES_BF16 = 1, PAGES_I8 = 2 };

constexpr int SCALE_BYTES = 4;  // a float32 after the codes of each int8 row

template <class T> constexpr bool IS_CODED = std::is_same<T, int8_t>::value;
template <class T> constexpr int row_bytes(int head_dim) { return head_dim * int(sizeof(T)) + (IS_CODED<T> ? SCALE_BYTES : 0); }

// The factor by which a row's values are to be multiplied.
template <class T> inline float row_scale(const T* row, int head_dim) {
    if constexpr (IS_CODED<T>) {
        float scale;
        std::memcpy(&scale, row + head_dim, sizeof scale);
        return scale;
    } else {
        return 1.0f;
    }
}

// Those of W rows.
template <class T> inline vf row_scales(const T* const* rows, int head_dim) {
    vf scales;
    for (int i = 0; i < W; i++) scales[i] = row_scale(rows[i], head_dim);
    return scales;
}

// Strides are in bytes. Tokens of a head are adjacent. If the values are the keys, K and V are 0 bytes apart.
struct CacheLayer {
    char* base;
    int64_t num_blocks, block_stride, kv_stride, head_stride;
    int32_t block_tokens, num_kv_heads, head_dim, kind;

    bool has_values() const { return kv_stride != 0; }

    template <class T> T* row(int64_t block, int64_t offset, int kv, int head) const {
        return (T*)(base + block * block_stride + kv * kv_stride + head * head_stride + offset * row_bytes<T>(head_dim));
    }

    // Addresses of K (kv = 0) or V (kv = 1) of tokens first .. first + count of one sequence.
    template <class T> void rows(const int32_t* table, int head, int kv, int first, int count, const T** out) const {
        int block = first / block_tokens, offset = first % block_tokens;
        for (int i = 0; i < count; block++, offset = 0) {
            const char* from = (const char*)row<T>(table[block], offset, kv, head);
            const int run = std::min(block_tokens - offset, count - i);
            for (int j = 0; j < run; j++, from += row_bytes<T>(head_dim)) out[i++] = (const T*)from;
        }
    }
};

// A row for tokens that nobody sees.
template <class T> inline const T* row_of_zeros(int head_dim) {
    static thread_local std::vector<char> zeros;
    zeros.resize(std::max(zeros.size(), size_t(row_bytes<T>(head_dim))));
    return (const T*)zeros.data();
}

// Prefetches elements d .. d + count of some rows, for use soon. Call it for a few rows at a time, between other work:
// a core keeps track of some dozen prefetches and drops the rest (seen on Sapphire Rapids, where all at once were worse
// than none).
template <class T> inline void bring_near(const T* const* rows, int num_rows, int d, int count) {
    for (int i = 0; i < num_rows; i++)
        for (int at = 0; at < count * int(sizeof(T)); at += 64) __builtin_prefetch((const char*)(rows[i] + d) + at, 0, ROWS_NEAR);
}

inline void put_row(float* to, const float* from, int D) { std::memcpy(to, from, D * sizeof(float)); }

inline void put_row(bf16* to, const float* from, int D) {
    int i = 0;
    for (; i + W <= D; i += W) store(to + i, load(from + i));
    for (; i < D; i++) to[i] = to_bf16(from[i]);
}

// The largest magnitude becomes 127: scale = max|x| / 127.
inline void put_row(int8_t* to, const float* from, int D) {
    float most = 0;
    int i = 0;
    vf top{};
    for (; i + W <= D; i += W) top = larger(top, magnitude(load(from + i)));
    most = largest(top);
    for (; i < D; i++) most = std::max(most, __builtin_fabsf(from[i]));
    const float scale = most / 127.0f;
    const float divisor = scale > 0 ? scale : 1.0f;
    for (i = 0; i + W <= D; i += W) {
        vc codes = __builtin_convertvector(__builtin_convertvector(round_whole(load(from + i) / divisor), vi), vc);
        std::memcpy(to + i, &codes, sizeof codes);
    }
    for (; i < D; i++) to[i] = int8_t(__builtin_rintf(from[i] / divisor));
    std::memcpy(to + D, &scale, sizeof scale);
}

}  // namespace mooncake
