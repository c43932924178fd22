// As attend_shared, on the matrix unit: keys times queries, and weights times values. Every row gets the same bits that
// attend_dots would give it alone.
#pragma once

#include "attend_shared.h"
#include "mix_tiles.h"

namespace mooncake {

template <class T, int VECS>
void attend_shared_tiles(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, const Item& item,
                         const Item* next, const Results& results, Scratch& scratch) {
    constexpr int lanes = VECS * W, strips = DOT_PART / STRIP_TOKENS;
    const int D = call.head_dim, rows = item.count;
    const int64_t weight_floats = WeightTiles::floats(lanes, strips);
    scratch.start(lanes * (D + DOT_PART + W + 2) + TILE_STRIP * D / 2 + weight_floats + strips * MIX_DIMS * W + DOT_PART + 192);
    float *mixed = scratch.take(lanes * D), *scores = scratch.take(lanes * DOT_PART), *totals = scratch.take(lanes * W);
    float *most = scratch.take(lanes), *sums = scratch.take(lanes), *value_scales = scratch.take(DOT_PART);
    bf16* key_strip = scratch.take<bf16>(TILE_STRIP * D);
    const WeightTiles weights((bf16*)scratch.take(weight_floats), strips);
    uint32_t* value_strips = scratch.take<uint32_t>(strips * MIX_DIMS * W);
    RowPlace places[lanes];
    places_of(call, plan, item, places);
    const auto* queries = (const uint32_t*)SharedQueries::of_thread().columns<VECS>(call, item, results.call_number, places, QueryForm::TILES);
    Tiles tiles(TILE_STRIP);

    const T* stream[2 * DOT_PART + AHEAD_ROWS];
    part_rows(call, cache, item, next, stream);
    std::fill(most, most + lanes, NEVER);
    for (int at = 0; at < DOT_PART; at += TILE_STRIP) {
        float* some = scores + at * lanes;
        const T* const* keys = stream + at;
        score_keys_in_tiles(keys, queries, lanes, D, key_strip, some, lanes * sizeof(float), W, keys + AHEAD_ROWS);
        for (int t = 0; t < TILE_STRIP && IS_CODED<T>; t++)
            for (int v = 0; v < lanes; v += W) store(some + t * lanes + v, load(some + t * lanes + v) * row_scale(keys[t], D));
        finish_scores(call, item, places, at, TILE_STRIP, VECS, some, most);
    }

    const T* const* values = stream + DOT_PART;
    PairWeights<VECS> pairs(scores, most, totals, IS_CODED<T> ? value_scales : nullptr);
    const auto weigh_strip = [&](int strip) {
        const int first = strip * STRIP_TOKENS;
        for (int t = first; t < first + STRIP_TOKENS && IS_CODED<T>; t++) value_scales[t] = row_scale(values[t], D);
        for (int pair = first / 2; pair < first / 2 + W; pair++) pairs.make(pair);
        for (int v = 0; v < VECS; v++) {
            vf block[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) block[i] = load(scores + (first / 2 + i) * lanes + v * W);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store((float*)(weights.tile(v, strip) + i * STRIP_TOKENS), block[i]);
        }
    };
    mix_in_tiles(weights, lanes, values, AHEAD_ROWS, D, value_strips, mixed, weigh_strip);
    pairs.sum(sums);
    float* out[lanes];
    results.places(item, out);
    for (int row = 0; row < rows; row++) in_order<T>(mixed + row * D, D, out[row]);
    results.finish(item, most, sums);
}

}  // namespace mooncake
