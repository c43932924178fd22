// Attention of the query rows of several sequences that share part of their contexts. Lanes run over query rows, as for
// many rows, and every row gets the same bits that attend_dots would give it alone, because sums keep the same order. K
// need not be transposed, which would be a tenth of the work here, and no row is processed on its own.
#pragma once

#include "attend_dots.h"
#include "attend_lanes.h"

namespace mooncake {

#if defined(__AVX512F__)
constexpr int SHARED_KEYS = 8;  // keys, or elements of V, in one pass
#else
constexpr int SHARED_KEYS = 4;
#endif
constexpr int SHARED_VECS = SHARED_ROWS / W;
static_assert(TILE == TILE_STRIP && SCORE_KEYS % TILE_STRIP == 0 || W != TILE_ROWS);
constexpr int MANY_SHARED = 32;  // with more rows than this it is faster than attend_dots; measured

// For TILE tokens; their weights, float32 [token][lane], become pairs in place.
template <int VECS> inline void mix_tile_in_pairs(const bf16* const* values, int D, float* weights, uint32_t* pairs, float* mixed) {
    for (int t = 0; t < TILE; t += 2) {
        bring_near(values + t + AHEAD_ROWS, 2, 0, D);
        for (int v = 0; v < VECS; v++) {
            float* even = weights + (t * VECS + v) * W;
            store((int32_t*)even, pairs_of(load(even), load(even + VECS * W)));
        }
        put_pairs(values[t], values[t + 1], D, pairs + t / 2 * D);
    }
    const auto kept = [](vf before, int) { return before; };
    for (int d = 0; d < D; d += SHARED_KEYS) mix_dims_in_pairs<SHARED_KEYS, VECS>(weights, pairs, TILE, d, D, kept, mixed);
}

// A shared part is DOT_PART tokens long and all its rows see all of it, so nothing is masked, and only rows are padded,
// to VECS vectors.
template <class T, int VECS>
void attend_shared(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, const Item& item,
                   const Results& results, Scratch& scratch) {
    constexpr int lanes = VECS * W;
    constexpr bool is_in_place = std::is_same<T, float>::value;
    const int D = call.head_dim, rows = item.count;
    const int32_t* table = call.table(item.seq);
    const bool is_tiled = fits_tiles<T>(D), in_pairs = works_in_pairs<T>(D);
    scratch.start(lanes * (2 * D + DOT_PART + 2) + TILE * D + 128);
    float *query = scratch.take(lanes * D), *mixed = scratch.take(lanes * D), *scores = scratch.take(lanes * DOT_PART);
    float *most = scratch.take(lanes), *sums = scratch.take(lanes), *wide = scratch.take(TILE * D);
    RowPlace places[lanes];
    places_of(call, plan, item, places);
    std::fill(places + rows, places + lanes, places[0]);
    vf block[W];
    const auto query_row = [&](int i) { return call.query_row(places[i].seq, item.kv_head, places[i].row); };
    std::optional<Tiles> tiles;
    if (is_tiled) {
        tiles_of_queries(query_row, lanes, D, call.scale_log2, (uint32_t*)query);
        tiles.emplace(TILE_STRIP);
    }
    for (int v = 0; v < VECS && in_pairs; v++)
        columns_of_queries(query_row, v * W, D, call.scale_log2, lanes, (uint32_t*)query + v * W);
    for (int d = 0; d < D && !is_tiled && !in_pairs; d += W)
        for (int v = 0; v < VECS; v++) {
            for (int i = 0; i < W; i++) block[i] = load(query_row(v * W + i) + d) * call.scale_log2;
            transpose(block);
            for (int i = 0; i < W; i++) store(query + ((d + i) * VECS + v) * W, block[i]);
        }

    const T* stream[2 * DOT_PART + AHEAD_ROWS];  // keys, values, and padding for prefetches
    for (int kv = 0; kv < 2; kv++) cache.rows(table, item.kv_head, kv, item.begin, DOT_PART, stream + kv * DOT_PART);
    std::fill(stream + 2 * DOT_PART, stream + 2 * DOT_PART + AHEAD_ROWS, stream[0]);
    const T* const* coded = stream;
    const float* tile[TILE];
    const auto open = [&](int kv, int at) {
        coded = stream + kv * DOT_PART + at;
        if ((is_tiled || in_pairs) && kv == 0) return;  // multiplied in place
        if constexpr (is_in_place)
            std::copy(coded, coded + TILE, tile);
        else
            widen_rows(coded, TILE, D, wide, tile);
    };
    const auto scale = [&](int at) {
        if constexpr (IS_CODED<T>)
            for (int t = 0; t < TILE; t++)
                for (int v = 0; v < VECS; v++) {
                    float* score = scores + ((at + t) * VECS + v) * W;
                    store(score, load(score) * row_scale(coded[t], D));
                }
    };
    vf top[VECS];
    std::fill(top, top + VECS, splat(NEVER));
    for (int at = 0; at < DOT_PART; at += TILE) {
        open(0, at);
        if (is_tiled)
            score_keys_in_tiles(coded, (const uint32_t*)query, lanes, D, (bf16*)wide, scores + at * lanes, lanes * sizeof(float), W,
                                coded + AHEAD_ROWS);
        else
            for (int t = 0; t < TILE; t += SHARED_KEYS) {
                if (is_in_place || in_pairs) bring_near(coded + t + AHEAD_ROWS, SHARED_KEYS, 0, D);
                if constexpr (std::is_same<T, bf16>::value)
                    if (in_pairs) {
                        score_pairs<SHARED_KEYS, VECS>((const uint32_t*)query, coded + t, D, scores + (at + t) * lanes);
                        continue;
                    }
                score_keys<SHARED_KEYS, VECS>(query, tile + t, D, scores + (at + t) * lanes);
            }
        scale(at);
        if (call.cap_log2) bend(scores + at * lanes, TILE * lanes, call.cap_log2);
        for (int t = at; t < at + TILE; t++)
            for (int v = 0; v < VECS; v++) top[v] = larger(top[v], load(scores + (t * VECS + v) * W));
    }

    vf totals[W][VECS] = {};  // by t % W, as in attend_dots
    std::memset(mixed, 0, sizeof(float) * lanes * D);
    const auto kept = [](vf before, int) { return before; };
    for (int at = 0; at < DOT_PART; at += TILE) {
        for (int t = at; t < at + TILE; t++) {
            if (is_in_place) bring_near(stream + DOT_PART + t + AHEAD_ROWS, 1, 0, D);
            for (int v = 0; v < VECS; v++) {
                float* score = scores + (t * VECS + v) * W;
                const vf p = exp2v(load(score) - top[v]);
                store(score, p);
                totals[t % W][v] += p;
            }
        }
        if constexpr (std::is_same<T, bf16>::value)
            if (in_pairs) {
                mix_tile_in_pairs<VECS>(stream + DOT_PART + at, D, scores + at * lanes, (uint32_t*)wide, mixed);
                continue;
            }
        open(1, at);
        scale(at);
        for (int d = 0; d < D; d += SHARED_KEYS) mix_dims<SHARED_KEYS, VECS>(scores + at * lanes, tile, TILE, d, kept, mixed);
    }

    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            for (int v = 0; v < VECS; v++) totals[i][v] += totals[i + half][v];
    for (int v = 0; v < VECS; v++) {
        store(most + v * W, top[v]);
        store(sums + v * W, totals[0][v]);
    }

    float* out = query;  // no longer needed
    for (int d = 0; d < D; d += W)
        for (int v = 0; v < VECS; v++) {
            for (int i = 0; i < W; i++) block[i] = load(mixed + ((d + i) * VECS + v) * W);
            transpose(block);
            for (int i = 0; i < W; i++) store(out + (v * W + i) * D + d, block[i]);
        }
    results.put(item, out, most, sums);
}

}  // namespace mooncake
