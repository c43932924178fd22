// Scores of query rows against keys on the matrix unit: keys are multiplied in place in their pages, and need not be
// transposed. Queries are rounded to bfloat16; int8 codes are exact in it.
#pragma once

#include "attention_plan.h"

namespace mooncake {

// Whether keys and values are multiplied as pairs of bfloat16, in vectors. Queries and weights are then rounded to
// bfloat16 too.
template <class T> inline bool works_in_pairs(int head_dim) {
    return std::is_same<T, bf16>::value && MULTIPLIES_BF16 && head_dim % (2 * W) == 0 && !fits_tiles<T>(head_dim);
}

// W query rows as columns of pairs of dimensions, [D / 2][W], `stride` lanes from one pair of dimensions to the next.
// `row(i)` is null past the last row.
template <class Row> inline void columns_of_queries(const Row& row, int first, int D, float scale, int64_t stride, uint32_t* out) {
    for (int d = 0; d < D; d += 2 * W) {
        vf block[W];
        for (int i = 0; i < W; i++) {
            const float* from = row(first + i);
            block[i] = from ? in_pairs(load(from + d) * scale, load(from + d + W) * scale) : vf{};
        }
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store((float*)out + (d / 2 + i) * stride, block[i]);
    }
}

// Query rows as tiles: [rows / 16][D / 32][16][16].
template <class Row> inline void tiles_of_queries(const Row& row, int rows, int D, float scale, uint32_t* out) {
    for (int first = 0; first < rows; first += W, out += W * D / 2) columns_of_queries(row, first, D, scale, W, out);
}

// The keys of `tokens` tokens, a multiple of 32, as strips: [token / 32][D / 32][32][32].
template <class T> inline void strips_of_keys(const T* const* keys, int tokens, int D, bf16* out) {
    for (int first = 0; first < tokens; first += TILE_STRIP)
        for (int d = 0; d < D; d += STRIP_TOKENS, out += TILE_STRIP * STRIP_TOKENS)
            for (int t = 0; t < TILE_STRIP; t++)
                if constexpr (std::is_same<T, bf16>::value)
                    std::memcpy(out + t * STRIP_TOKENS, keys[first + t] + d, ROW_UNIT);
                else
                    for (int half = 0; half < STRIP_TOKENS; half += W)
                        store(out + t * STRIP_TOKENS + half, load(keys[first + t] + d + half));
}

// scores[key][row] of TILE_STRIP keys and one tile of queries; scores of one row are `stride` bytes apart. The keys of
// a strip are `key_stride` bytes apart, and their next 32 dimensions `step` bytes further on. Prefetches `ahead`
// [TILE_STRIP], if not null, a few rows at a time. Needs Tiles(TILE_STRIP).
template <class T>
inline void score_strip(const char* keys, int64_t key_stride, int64_t step, const uint32_t* queries, int D, float* scores,
                        int64_t stride, const T* const* ahead) {
#if defined(MOONCAKE_TILES)
    settle_memory();
    _tile_zero(0);
    _tile_zero(2);
    for (int d = 0; d < D; d += STRIP_TOKENS, keys += step, queries += W * W) {
        const auto bring = [&](int quarter) {
            if (ahead) bring_near(ahead + quarter * TILE_STRIP / 4, TILE_STRIP / 4, d, STRIP_TOKENS);
        };
        bring(0);
        _tile_loadd(6, queries, ROW_UNIT);
        _tile_loadd(4, keys, key_stride);
        bring(1);
        _tile_loadd(5, keys + TILE_ROWS * key_stride, key_stride);
        bring(2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        bring(3);
    }
    _tile_stored(0, scores, stride);
    _tile_stored(2, (char*)scores + TILE_ROWS * stride, stride);
#endif
}

// As above, for all tiles of queries of `rows` rows, whose scores are `tile_floats` floats apart. `strip` has room for
// D * TILE_STRIP.
template <class T>
void score_keys_in_tiles(const T* const* keys, const uint32_t* queries, int rows, int D, bf16* strip, float* scores, int64_t stride,
                         int64_t tile_floats, const T* const* ahead = nullptr) {
    bool is_adjacent = std::is_same<T, bf16>::value;
    for (int t = 1; is_adjacent && t < TILE_STRIP; t++) is_adjacent = keys[t] == keys[t - 1] + D;
    const char* from = (const char*)(is_adjacent ? (const void*)keys[0] : strip);
    const int64_t key_stride = is_adjacent ? D * int64_t(sizeof(bf16)) : ROW_UNIT, step = is_adjacent ? ROW_UNIT : TILE_STRIP * ROW_UNIT;
    if (!is_adjacent) strips_of_keys(keys, TILE_STRIP, D, strip);
    for (int row = 0; row < rows; row += W, queries += W * D / 2, scores += tile_floats, ahead = nullptr)
        score_strip(from, key_stride, step, queries, D, scores, stride, ahead);
}

}  // namespace mooncake
