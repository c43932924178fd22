// The small steps around products and attention: RMSNorm, SwiGLU's gate, RoPE and the cache write.
#pragma once

#include "pages.h"
#include "pool.h"

namespace mooncake {

enum Status : int { OK = 0, BAD_BLOCK = 1, BAD_POSITION = 2, BAD_TOKEN = 3, STOPPED_BY_HOOK = 4, NO_MEMORY = 5 };

inline void normalise(const float* from, const float* weight, float* to, int count, float eps) {
    vf squares{};
    int i = 0;
    for (; i + W <= count; i += W) squares += load(from + i) * load(from + i);
    float total = sum(squares);
    for (; i < count; i++) total += from[i] * from[i];
    const float inverse = 1.0f / __builtin_sqrtf(total / float(count) + eps);
    for (i = 0; i + W <= count; i += W) store(to + i, load(from + i) * inverse * load(weight + i));
    for (; i < count; i++) to[i] = from[i] * inverse * weight[i];
}

inline void add_rms_norm(float* residual, const float* update, const float* weight, float* out, int64_t tokens, int width,
                         float eps, int threads) {
    parallel(tokens, tokens * width < (1 << 15) ? 1 : threads, [&](int64_t t) {
        float* row = residual + t * width;
        if (update) {
            const float* more = update + t * width;
            int i = 0;
            for (; i + W <= width; i += W) store(row + i, load(row + i) + load(more + i));
            for (; i < width; i++) row[i] += more[i];
        }
        normalise(row, weight, out + t * width, width, eps);
    });
}

inline void silu_mul(const float* gate_up, float* out, int64_t tokens, int width, int threads) {
    parallel(tokens, tokens * width < (1 << 14) ? 1 : threads, [&](int64_t t) {
        const float *gate = gate_up + 2 * t * width, *up = gate + width;
        float* to = out + t * width;
        int i = 0;
        for (; i + W <= width; i += W) store(to + i, silu(load(gate + i)) * load(up + i));
        for (; i < width; i++) to[i] = silu(splat(gate[i]))[0] * up[i];
    });
}

// Rotates element i with element i + D/2; `to` may be `from`.
inline void rotate(const float* from, const float* cos, const float* sin, float* to, int D) {
    const int half = D / 2;
    int i = 0;
    for (; i + W <= half; i += W) {
        vf a = load(from + i), b = load(from + half + i), c = load(cos + i), s = load(sin + i);
        store(to + i, a * c - b * s);
        store(to + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = from[i], b = from[half + i];
        to[i] = a * cos[i] - b * sin[i];
        to[half + i] = b * cos[i] + a * sin[i];
    }
}

struct Rope {
    const float *cos, *sin;  // [positions][D / 2]
    int64_t num_positions;
    const float *query_norm, *key_norm;  // [D], or null
    float eps;
};

inline int check_slots(const int64_t* slots, int64_t tokens, const CacheLayer& cache) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= cache.num_blocks * cache.block_tokens) return BAD_BLOCK;
    return OK;
}

inline int check_positions(const int64_t* positions, int64_t tokens, const Rope& rope) {
    for (int64_t t = 0; t < tokens; t++)
        if (positions[t] < 0 || positions[t] >= rope.num_positions) return BAD_POSITION;
    return OK;
}

// `qkv` is [T][Hq + 2 * Hkv][D], or [T][Hq + Hkv][D] if keys are the values. Queries are rotated in place; keys and
// values are written to the cache.
template <class T>
void rope_write_kv(float* qkv, int64_t stride, const Rope& rope, const int64_t* positions, const CacheLayer& cache,
                   const int64_t* slots, int64_t tokens, int num_heads, int threads) {
    const int D = cache.head_dim, heads = num_heads + cache.num_kv_heads;
    parallel(tokens, tokens * heads * D < (1 << 15) ? 1 : threads, [&](int64_t t) {
        float* row = qkv + t * stride;
        const float *cos = rope.cos + positions[t] * (D / 2), *sin = rope.sin + positions[t] * (D / 2);
        const int64_t block = slots[t] / cache.block_tokens, offset = slots[t] % cache.block_tokens;
        for (int h = 0; h < heads; h++, row += D) {
            const bool is_key = h >= num_heads;
            if (const float* norm = is_key ? rope.key_norm : rope.query_norm) normalise(row, norm, row, D, rope.eps);
            rotate(row, cos, sin, row, D);
            if (is_key) put_row(cache.row<T>(block, offset, 0, h - num_heads), row, D);
        }
        for (int h = 0; h < cache.num_kv_heads && cache.has_values(); h++, row += D) put_row(cache.row<T>(block, offset, 1, h), row, D);
    });
}

// Copies keys and values of tokens from slot to slot, with keys rotated by `shifts` positions. D is a multiple of W.
template <class T>
void copy_turned(const CacheLayer& cache, const Rope& rope, const int64_t* sources, const int64_t* slots, const int64_t* shifts,
                 int64_t tokens, int threads) {
    const int D = cache.head_dim;
    parallel(tokens, tokens * cache.num_kv_heads * D < (1 << 15) ? 1 : threads, [&](int64_t t) {
        static thread_local Scratch memory;
        float* key = memory.start(D);
        const float *cos = rope.cos + shifts[t] * (D / 2), *sin = rope.sin + shifts[t] * (D / 2);
        const auto place = [&](int64_t slot, int kv, int head) {
            return cache.row<T>(slot / cache.block_tokens, slot % cache.block_tokens, kv, head);
        };
        for (int h = 0; h < cache.num_kv_heads; h++) {
            const T* from = place(sources[t], 0, h);
            for (int i = 0; i < D; i += W) store(key + i, load(from + i) * row_scale(from, D));
            rotate(key, cos, sin, key, D);
            put_row(place(slots[t], 0, h), key, D);
            std::memcpy(place(slots[t], 1, h), place(sources[t], 1, h), row_bytes<T>(D));
        }
    });
}

// Calls body(T{}) with the type of the pages' elements.
template <class Body> auto with_pages(int32_t kind, const Body& body) {
    switch (kind) {
        case PAGES_BF16: return body(bf16{});
        case PAGES_I8: return body(int8_t{});
        default: return body(float{});
    }
}

}  // namespace mooncake
