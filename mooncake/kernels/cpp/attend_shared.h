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
constexpr int SOON_ROWS = 16;    // rows of K or V to have in L1 ahead
constexpr int STRIP = DOT_PART / 2 * SHARED_KEYS;  // pairs of elements of V that one pass mixes

// Turns the scores of a part, [token][lane], into weights: in place, or as pairs of tokens, [pair][lane], from the same
// beginning. Returns their sum in one vector of lanes, added up in the order of attend_dots: by t % W first.
template <int VECS, bool IN_PAIRS> inline vf weigh(float* scores, vf top) {
    const auto weight = [&](const float* score) {
        const vf below = load(score) - top;
        return IN_PAIRS ? exp2_roughly(below) : exp2v(below);
    };
    vf totals[W] = {};
    float* weights = scores;
    for (int at = 0; at < DOT_PART; at += W)
#pragma GCC unroll 16
        for (int t = 0; t < W; t += 2, scores += 2 * VECS * W) {
            const vf first = weight(scores), second = weight(scores + VECS * W);
            totals[t] += first;
            totals[t + 1] += second;
            if constexpr (IN_PAIRS) {
                store((int32_t*)weights, pairs_of(first, second));
                weights += VECS * W;
            } else {
                store(scores, first);
                store(scores + VECS * W, second);
            }
        }
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) totals[i] += totals[i + half];
    return totals[0];
}

// Prefetches `count` elements of rows that are probably adjacent: few blocks are no multiple of so many tokens.
template <int LOCALITY> inline void bring(const bf16* rows, int count) {
    for (int i = 0; i < count; i += 32) __builtin_prefetch(rows + i, 0, LOCALITY);
}

// A strip of V is SHARED_KEYS dimensions, from `d` on, of all tokens of a part: [pair of tokens][dimension]. Puts one pair.
inline void put_strip(const bf16* const* values, int d, int pair, uint32_t* strip) {
    const bf16* const* rows = values + 2 * pair;
    const bf16 *first = rows[0] + d, *second = rows[1] + d;
    for (int i = 0; i < 2; i++) __builtin_prefetch(rows[SOON_ROWS + i] + d);
    for (int i = 0; i < SHARED_KEYS; i++) strip[pair * SHARED_KEYS + i] = first[i].bits | uint32_t(second[i].bits) << 16;
}

// mixed[d][lane] = sum over the tokens of a part, for a strip of dimensions. Weights are [pair][lane]. Meanwhile the
// strip `d` is put into `next`: between products that costs less than on its own.
template <int VECS>
inline void mix_strip(const float* weights, const uint32_t* strip, const bf16* const* values, int d, uint32_t* next, float* mixed) {
    vf acc[SHARED_KEYS][VECS] = {};
    for (int64_t pair = 0; pair < DOT_PART / 2; pair++, weights += VECS * W) {
        vi p[VECS];
        for (int v = 0; v < VECS; v++) p[v] = load_as<vi>(weights + v * W);
        for (int i = 0; i < SHARED_KEYS; i++)
            for (int v = 0; v < VECS; v++) acc[i][v] = add_products(acc[i][v], strip[pair * SHARED_KEYS + i], p[v]);
        put_strip(values, d, pair, next);
    }
    for (int i = 0; i < SHARED_KEYS; i++)
        for (int v = 0; v < VECS; v++) store(mixed + (i * VECS + v) * W, acc[i][v]);
}

// Scores of a part, whose values are prefetched meanwhile. `stream`: keys, values, and what comes after them. Keys are
// brought to the second cache and then to L1, as even its latency was waited for; values fall out of L1 into the second
// cache, and came there more reliably than if prefetched into it.
template <int VECS>
inline void score_part_in_pairs(const uint32_t* query, const bf16* const* stream, int D, float* scores, vf* top) {
    for (int t = 0; t < DOT_PART; t += SHARED_KEYS) {
        bring<NEAR>(stream[t + AHEAD_ROWS], SHARED_KEYS * D);
        bring<3>(stream[t + DOT_PART], SHARED_KEYS * D);
        bring<3>(stream[t + SOON_ROWS], SHARED_KEYS * D);
        score_pairs<SHARED_KEYS, VECS>(query, stream + t, D, scores + t * VECS * W, top);
    }
}

// Prefetches the first of the rows that come after `values`.
template <int VECS>
inline void mix_part_in_pairs(const float* weights, const bf16* const* values, int D, uint32_t* strips, float* mixed) {
    uint32_t *strip = strips, *next = strips + STRIP;
    for (int pair = 0; pair < DOT_PART / 2; pair++) put_strip(values, 0, pair, strip);
    for (int d = 0; d < D; d += SHARED_KEYS, std::swap(strip, next)) {
        bring<NEAR>(values[DOT_PART + d * AHEAD_ROWS / D], AHEAD_ROWS * SHARED_KEYS);
        mix_strip<VECS>(weights, strip, values, d + SHARED_KEYS < D ? d + SHARED_KEYS : 0, next, mixed + d * VECS * W);
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
    scratch.start(lanes * (2 * D + DOT_PART + 2) + std::max(2 * STRIP, TILE * D) + 128);
    float *query = scratch.take(lanes * D), *mixed = scratch.take(lanes * D), *scores = scratch.take(lanes * DOT_PART);
    float *most = scratch.take(lanes), *sums = scratch.take(lanes), *wide = scratch.take(std::max(2 * STRIP, TILE * D));
    RowPlace places[lanes];
    places_of(call, plan, item, places);
    const float* queries[lanes];
    for (int row = 0; row < rows; row++) queries[row] = call.query_row(places[row].seq, item.kv_head, places[row].row);
    std::fill(queries + rows, queries + lanes, queries[0]);
    vf block[W];
    const auto query_row = [&](int i) { return queries[i]; };
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
        if (is_tiled && kv == 0) return;  // multiplied in place
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
    const auto finish_scores = [&](int at, int count) {
        if (call.cap_log2) bend(scores + at * lanes, count * lanes, call.cap_log2);
        for (int t = at; t < at + count; t++)
            for (int v = 0; v < VECS; v++) top[v] = larger(top[v], load(scores + (t * VECS + v) * W));
    };
    if constexpr (std::is_same<T, bf16>::value)
        if (in_pairs) {
            score_part_in_pairs<VECS>((const uint32_t*)query, stream, D, scores, top);
            if (call.cap_log2) {
                std::fill(top, top + VECS, splat(NEVER));
                finish_scores(0, DOT_PART);
            }
        }
    for (int at = 0; at < DOT_PART && !in_pairs; at += TILE) {
        open(0, at);
        if (is_tiled)
            score_keys_in_tiles(coded, (const uint32_t*)query, lanes, D, (bf16*)wide, scores + at * lanes, lanes * sizeof(float), W,
                                coded + AHEAD_ROWS);
        for (int t = 0; t < TILE && !is_tiled; t += SHARED_KEYS) {
            if (is_in_place) bring_near(coded + t + AHEAD_ROWS, SHARED_KEYS, 0, D);
            score_keys<SHARED_KEYS, VECS>(query, tile + t, D, scores + (at + t) * lanes);
        }
        scale(at);
        finish_scores(at, TILE);
    }

    for (int v = 0; v < VECS; v++) {
        float* column = scores + v * W;
        store(most + v * W, top[v]);
        store(sums + v * W, in_pairs ? weigh<VECS, true>(column, top[v]) : weigh<VECS, false>(column, top[v]));
    }

    if constexpr (std::is_same<T, bf16>::value)
        if (in_pairs) mix_part_in_pairs<VECS>(scores, stream + DOT_PART, D, (uint32_t*)wide, mixed);
    if (!in_pairs) std::memset(mixed, 0, sizeof(float) * lanes * D);
    const auto kept = [](vf before, int) { return before; };
    for (int at = 0; at < DOT_PART && !in_pairs; at += TILE) {
        open(1, at);
        scale(at);
        for (int d = 0; d < D; d += SHARED_KEYS) {
            if (is_in_place) bring_near(coded + AHEAD_ROWS + d * TILE / D, std::max(1, TILE * SHARED_KEYS / D), 0, D);
            mix_dims<SHARED_KEYS, VECS>(scores + at * lanes, tile, TILE, d, kept, mixed);
        }
    }

    float* out[lanes];
    results.places(item, out);
    std::fill(out + rows, out + lanes, query);  // no longer needed
    for (int v = 0; v < VECS; v++)
        for (int d = 0; d < D; d += W) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) block[i] = load(mixed + ((d + i) * VECS + v) * W);
            transpose(block);
            for (int i = 0; i < W; i++) store(out[v * W + i] + d, block[i]);
        }
    results.finish(item, most, sums);
}

}  // namespace mooncake
