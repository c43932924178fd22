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
constexpr int SHARED_KEYS = 2;
#endif
constexpr int SHARED_VECS = SHARED_ROWS / W;
constexpr int TILE = 32;         // tokens of K and V that stay in L1 between uses
constexpr int MANY_SHARED = 32;  // with more rows than this it is faster than attend_dots; measured
constexpr int SOON_ROWS = 16;    // rows of K or V to have in L1 ahead
constexpr int STRIP = DOT_PART / 2 * SHARED_KEYS;  // pairs of elements of V that one pass mixes

// The weights of a part as pairs of tokens, [pair][lane], from the same beginning as its scores, made one pair after the
// other: between products, because the exponential uses other parts of the core than they do (seen on Zen 4).
template <int VECS> class PairWeights {
public:
    // `totals` is memory for W * VECS * W sums. `scales`: factors of the tokens' weights that their sum is without, or null.
    PairWeights(float* scores, const float* most, float* totals, const float* scales = nullptr)
        : scores_(scores), totals_(totals), most_(most), scales_(scales) {
        std::fill(totals, totals + W * VECS * W, 0.0f);
    }

    void make(int64_t pair) {
        const float* scores = scores_ + 2 * pair * VECS * W;
        float *weights = scores_ + pair * VECS * W, *totals = totals_ + 2 * pair % W * VECS * W;
        for (int v = 0; v < VECS; v++, scores += W, totals += W, weights += W) {
            const vf most = load(most_ + v * W);
            const vf first = exp2_roughly(load(scores) - most), second = exp2_roughly(load(scores + VECS * W) - most);
            store(totals, load(totals) + first);
            store(totals + VECS * W, load(totals + VECS * W) + second);
            if (scales_)
                store((int32_t*)weights, pairs_of(first * scales_[2 * pair], second * scales_[2 * pair + 1]));
            else
                store((int32_t*)weights, pairs_of(first, second));
        }
    }

    // Of each lane, added up as `weigh` does.
    void sum(float* sums) const {
        for (int half = W / 2 * VECS * W; half >= VECS * W; half /= 2)
            for (int i = 0; i < half; i += W) store(totals_ + i, load(totals_ + i) + load(totals_ + i + half));
        std::copy(totals_, totals_ + VECS * W, sums);
    }

private:
    float *scores_, *totals_;  // totals: [t % W][lane]
    const float *most_, *scales_;
};

// Prefetches `count` elements of rows that are probably adjacent: few blocks are no multiple of so many tokens.
template <int LOCALITY> inline void bring(const bf16* rows, int count) {
    for (int i = 0; i < count; i += 32) __builtin_prefetch(rows + i, 0, LOCALITY);
}

// A strip of V is SHARED_KEYS dimensions, from `d` on, of all tokens of a part: [pair of tokens][dimension]. Puts one pair.
inline void put_strip(const bf16* const* values, int d, int pair, uint32_t* strip) {
    const bf16* const* rows = values + 2 * pair;
    const bf16 *first = rows[0] + d, *second = rows[1] + d;
    strip += pair * SHARED_KEYS;
    for (int i = 0; i < 2; i++) __builtin_prefetch(rows[SOON_ROWS + i] + d);
#if defined(__AVX512F__)  // GCC 12 inserts word by word where it has few registers left
    const __m128i a = _mm_loadu_si128((const __m128i*)first), b = _mm_loadu_si128((const __m128i*)second);
    _mm_storeu_si128((__m128i*)strip, _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128((__m128i*)strip + 1, _mm_unpackhi_epi16(a, b));
#else
    for (int i = 0; i < SHARED_KEYS; i++) strip[i] = first[i].bits | uint32_t(second[i].bits) << 16;
#endif
}

// mixed[d][lane] = sum over the tokens of a part, for a strip of dimensions. Weights are [pair][lane]; `prepare(pair)` is
// called just before those of a pair are read. Meanwhile the strip `d` is put into `next`: between products that costs
// less than on its own.
template <int VECS, class Prepare>
inline void mix_strip(const float* weights, const uint32_t* strip, const bf16* const* values, int d, uint32_t* next, float* mixed,
                      const Prepare& prepare) {
    vf acc[SHARED_KEYS][VECS] = {};
    for (int64_t pair = 0; pair < DOT_PART / 2; pair++, weights += VECS * W) {
        prepare(pair);
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
inline void score_part_in_pairs(const uint32_t* query, const bf16* const* stream, int D, float* scores, float* most) {
    for (int t = 0; t < DOT_PART; t += SHARED_KEYS) {
        bring<NEAR>(stream[t + AHEAD_ROWS], SHARED_KEYS * D);
        bring<3>(stream[t + DOT_PART], SHARED_KEYS * D);
        bring<3>(stream[t + SOON_ROWS], SHARED_KEYS * D);
        score_pairs<SHARED_KEYS, VECS>(query, stream + t, D, scores + t * VECS * W, most);
    }
}

// Turns the scores of a part into weights while its first strip is mixed, then mixes the others. Prefetches the first of
// the rows that come after `values`.
template <int VECS>
inline void mix_part_in_pairs(float* scores, const float* most, const bf16* const* values, int D, uint32_t* strips, float* mixed,
                              float* totals, float* sums) {
    uint32_t *strip = strips, *next = strips + STRIP;
    PairWeights<VECS> weights(scores, most, totals);
    weights.make(0);
    const auto weigh_next = [&](int64_t pair) {
        if (pair + 1 < DOT_PART / 2) weights.make(pair + 1);
    };
    const auto is_weighed = [](int64_t) {};
    for (int pair = 0; pair < DOT_PART / 2; pair++) put_strip(values, 0, pair, strip);
    for (int d = 0; d < D; d += SHARED_KEYS, std::swap(strip, next)) {
        bring<NEAR>(values[DOT_PART + d * AHEAD_ROWS / D], AHEAD_ROWS * SHARED_KEYS);
        const int then = d + SHARED_KEYS < D ? d + SHARED_KEYS : 0;
        float* to = mixed + d * VECS * W;
        if (d == 0)
            mix_strip<VECS>(scores, strip, values, then, next, to, weigh_next);
        else
            mix_strip<VECS>(scores, strip, values, then, next, to, is_weighed);
    }
    weights.sum(sums);
}

// [D][VECS * W]; [D / 2][VECS * W]; or as tiles_of_queries makes them.
enum class QueryForm { FLOATS, PAIRS, TILES };

// The query rows of the last shared part that a thread attended to, scaled, as columns: those of its next one are often
// the same.
class SharedQueries {
public:
    static SharedQueries& of_thread() {
        static thread_local SharedQueries queries;
        return queries;
    }

    template <int VECS>
    const float* columns(const AttentionCall& call, const Item& item, uint64_t call_number, const RowPlace* places, QueryForm form) {
        const auto of_kept = [](const RowPlace& a, const RowPlace& b) { return a.seq == b.seq; };
        const bool is_kept = call_number == call_number_ && item.kv_head == kv_head_ && item.count == rows_ &&
                             std::equal(places, places + item.count, places_, of_kept);
        call_number_ = call_number, kv_head_ = item.kv_head, rows_ = item.count;
        std::copy(places, places + item.count, places_);
        constexpr int lanes = VECS * W;
        const int D = call.head_dim;
        float* query = memory_.start(lanes * D);
        if (is_kept) return query;
        const float* queries[lanes];
        for (int row = 0; row < item.count; row++) queries[row] = call.query_row(places[row].seq, item.kv_head, places[row].row);
        std::fill(queries + item.count, queries + lanes, queries[0]);
        const auto query_row = [&](int i) { return queries[i]; };
        if (form == QueryForm::TILES) {
            tiles_of_queries(query_row, lanes, D, call.scale_log2, (uint32_t*)query);
        } else if (form == QueryForm::PAIRS) {
            for (int v = 0; v < VECS; v++)
                columns_of_queries(query_row, v * W, D, call.scale_log2, lanes, (uint32_t*)query + v * W);
        } else {
            vf block[W];
            for (int d = 0; d < D; d += W)
                for (int v = 0; v < VECS; v++) {
                    for (int i = 0; i < W; i++) block[i] = load(query_row(v * W + i) + d) * call.scale_log2;
                    transpose(block);
                    for (int i = 0; i < W; i++) store(query + ((d + i) * VECS + v) * W, block[i]);
                }
        }
        return query;
    }

private:
    uint64_t call_number_ = 0;
    int kv_head_ = 0, rows_ = 0;
    RowPlace places_[SHARED_ROWS];
    Scratch memory_;
};

// `lean` for `count` tokens of a part from the one at `at` on, whose scores are [token][lane].
inline void lean_rows(const AttentionCall& call, const Item& item, const RowPlace* places, int at, int count, int vecs, float* scores) {
    for (int v = 0; v < vecs; v++) {
        vf slopes{};
        vi distance{};
        for (int i = 0; i < W && v * W + i < item.count; i++) {
            const RowPlace& place = places[v * W + i];
            slopes[i] = call.slope_log2(item.kv_head, place.row);
            distance[i] = item.begin + at - call.position(place.seq, place.row);
        }
        lean(scores + v * W, count, vecs * W, slopes, distance, 1);
    }
}

// What becomes of the scores of `count` tokens of a part from the one at `at` on, [token][lane], before their weights:
// soft caps and slopes, if the call has any. Raises `most`, the largest score of each lane.
inline void finish_scores(const AttentionCall& call, const Item& item, const RowPlace* places, int at, int count, int vecs, float* scores,
                          float* most) {
    const int lanes = vecs * W;
    if (call.cap_log2) bend(scores, count * lanes, call.cap_log2);
    if (call.alibi_slopes) lean_rows(call, item, places, at, count, vecs, scores);
    for (int t = 0; t < count; t++)
        for (int v = 0; v < lanes; v += W) store(most + v, larger(load(most + v), load(scores + t * lanes + v)));
}

// The keys of a shared part, its values, and what is prefetched past their end. `next`: as for attend_dots.
template <class T>
inline void part_rows(const AttentionCall& call, const CacheLayer& cache, const Item& item, const Item* next, const T** stream) {
    for (int kv = 0; kv < 2; kv++) cache.rows(call.table(item.seq), item.kv_head, kv, item.begin, DOT_PART, stream + kv * DOT_PART);
    const T** ahead = stream + 2 * DOT_PART;
    std::fill(ahead, ahead + AHEAD_ROWS, stream[0]);
    if (next) cache.rows(call.table(next->seq), next->kv_head, 0, next->begin, std::min(AHEAD_ROWS, next->end - next->begin), ahead);
}

// A shared part is DOT_PART tokens long and all its rows see all of it, so nothing is masked, and only rows are padded,
// to VECS vectors.
template <class T, int VECS>
void attend_shared(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, const Item& item,
                   const Item* next, const Results& results, Scratch& scratch) {
    constexpr int lanes = VECS * W;
    constexpr bool is_in_place = std::is_same<T, float>::value;
    const int D = call.head_dim, rows = item.count;
    const bool in_pairs = works_in_pairs<T>(D);
    scratch.start(lanes * (D + DOT_PART + W + 2) + std::max(2 * STRIP, TILE * D) + 128);
    float *mixed = scratch.take(lanes * D), *scores = scratch.take(lanes * DOT_PART), *totals = scratch.take(lanes * W);
    float *most = scratch.take(lanes), *sums = scratch.take(lanes), *wide = scratch.take(std::max(2 * STRIP, TILE * D));
    RowPlace places[lanes];
    places_of(call, plan, item, places);
    const float* query =
        SharedQueries::of_thread().columns<VECS>(call, item, results.call_number, places, in_pairs ? QueryForm::PAIRS : QueryForm::FLOATS);

    const T* stream[2 * DOT_PART + AHEAD_ROWS];
    part_rows(call, cache, item, next, stream);
    const T* const* coded = stream;
    const float* tile[TILE];
    const auto open = [&](int kv, int at) {
        coded = stream + kv * DOT_PART + at;
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
    std::fill(most, most + lanes, NEVER);
    if constexpr (std::is_same<T, bf16>::value)
        if (in_pairs) {
            score_part_in_pairs<VECS>((const uint32_t*)query, stream, D, scores, most);
            if (call.cap_log2 || call.alibi_slopes) {
                std::fill(most, most + lanes, NEVER);
                finish_scores(call, item, places, 0, DOT_PART, VECS, scores, most);
            }
        }
    for (int at = 0; at < DOT_PART && !in_pairs; at += TILE) {
        open(0, at);
        for (int t = 0; t < TILE; t += SHARED_KEYS) {
            if (is_in_place) bring_near(coded + t + AHEAD_ROWS, SHARED_KEYS, 0, D);
            score_keys<SHARED_KEYS, VECS>(query, tile + t, D, scores + (at + t) * lanes);
        }
        scale(at);
        finish_scores(call, item, places, at, TILE, VECS, scores + at * lanes, most);
    }

    for (int v = 0; v < lanes && !in_pairs; v += W) store(sums + v, weigh<false>(scores + v, lanes, DOT_PART, load(most + v)));

    if constexpr (std::is_same<T, bf16>::value)
        if (in_pairs) mix_part_in_pairs<VECS>(scores, most, stream + DOT_PART, D, (uint32_t*)wide, mixed, totals, sums);
    if (!in_pairs) std::memset(mixed, 0, sizeof(float) * lanes * D);
    for (int at = 0; at < DOT_PART && !in_pairs; at += TILE) {
        open(1, at);
        scale(at);
        for (int d = 0; d < D; d += SHARED_KEYS) {
            if (is_in_place) bring_near(coded + AHEAD_ROWS + d * TILE / D, std::max(1, TILE * SHARED_KEYS / D), 0, D);
            mix_dims<SHARED_KEYS, VECS>(scores + at * lanes, tile, TILE, d, mixed);
        }
    }

    float* out[lanes];
    results.places(item, out);
    std::fill(out + rows, out + lanes, scores);  // no longer needed
    vf block[W];
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
