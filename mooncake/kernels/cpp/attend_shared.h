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
constexpr int MIX_TOKENS = 2 * TILE;  // as pairs, they take the room of TILE tokens in float32
constexpr int LINE = 32;               // bfloat16 values in a cache line
constexpr int MANY_SHARED = 32;  // with more rows than this it is faster than attend_dots; measured

// Turns the scores of W tokens, [token][lane], into weights, and adds these to `totals`. In pairs, the weights of tokens
// t and t + 1 replace the scores of t.
template <int VECS, bool IN_PAIRS> inline void weigh(float* scores, const vf* top, vf (*totals)[VECS]) {
    for (int v = 0; v < VECS; v++)
#pragma GCC unroll 16
        for (int t = 0; t < W; t += 2) {
            float *even = scores + (t * VECS + v) * W, *odd = even + VECS * W;
            const vf first = exp2v(load(even) - top[v]), second = exp2v(load(odd) - top[v]);
            totals[t][v] += first;
            totals[t + 1][v] += second;
            if constexpr (IN_PAIRS) {
                store((int32_t*)even, pairs_of(first, second));
            } else {
                store(even, first);
                store(odd, second);
            }
        }
}

// For MIX_TOKENS tokens.
template <int VECS>
inline void mix_tokens_in_pairs(const bf16* const* values, int D, const float* weights, uint32_t* pairs, float* mixed) {
    for (int t = 0; t < MIX_TOKENS; t += 2) put_pairs(values[t], values[t + 1], D, pairs + t / 2 * D);
    const auto kept = [](vf before, int) { return before; };
    const int lines = D / LINE;
    for (int d = 0; d < D; d += SHARED_KEYS) {  // each prefetches one line of a quarter of the rows
        const int at = d / SHARED_KEYS % lines * LINE;
        const bf16* const* ahead = values + AHEAD_ROWS + d / SHARED_KEYS / lines * (MIX_TOKENS / 4);
        bring_near(ahead, MIX_TOKENS / 4, at, LINE);
        mix_dims_in_pairs<SHARED_KEYS, VECS>(weights, pairs, MIX_TOKENS, d, D, kept, mixed);
    }
}

// A shared part is DOT_PART tokens long and all its rows see all of it, so nothing is masked, and only rows are padded,
// to VECS vectors. `next`: as for attend_dots.
template <class T, int VECS>
void attend_shared(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, const Item& item,
                   const Item* next, const Results& results, Scratch& scratch) {
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

    const T* stream[2 * DOT_PART + AHEAD_ROWS];  // keys, values, and what is prefetched past their end
    for (int kv = 0; kv < 2; kv++) cache.rows(table, item.kv_head, kv, item.begin, DOT_PART, stream + kv * DOT_PART);
    std::fill(stream + 2 * DOT_PART, stream + 2 * DOT_PART + AHEAD_ROWS, stream[0]);
    if (next) {
        const int count = std::min(AHEAD_ROWS, next->end - next->begin);
        cache.rows(call.table(next->seq), next->kv_head, 0, next->begin, count, stream + 2 * DOT_PART);
    }
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
    const int step = in_pairs ? MIX_TOKENS : TILE;
    for (int at = 0; at < DOT_PART; at += step) {
        for (int t = at; t < at + step; t += W) {
            if (is_in_place) bring_near(stream + DOT_PART + t + AHEAD_ROWS, W, 0, D);
            (in_pairs ? weigh<VECS, true> : weigh<VECS, false>)(scores + t * lanes, top, totals);
        }
        if constexpr (std::is_same<T, bf16>::value)
            if (in_pairs) {
                mix_tokens_in_pairs<VECS>(stream + DOT_PART + at, D, scores + at * lanes, (uint32_t*)wide, mixed);
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
