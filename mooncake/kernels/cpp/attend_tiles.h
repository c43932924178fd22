// Attention of many query rows of one sequence (chunks) on the matrix unit, over bfloat16 or int8 pages.
//
// As in attend_lanes, lanes run over query rows, so softmax is vertical. Scores are K times queries: keys are the rows
// of a strip and queries the outputs of a panel, as in a product with weights (tiles.h). The softmax weights, rounded
// to bfloat16, are the panel of a second product, whose rows are the columns of V. int8 codes are exact in bfloat16;
// key scales are applied to the scores, value scales to the weights.
#pragma once

#include "attend_lanes.h"
#include "score_tiles.h"

namespace mooncake {

constexpr int TILE_KEYS = 128;     // tokens between updates of the largest score
constexpr int TILE_LANES = PANEL;  // query rows in one row block

// W values as bfloat16 bits, each in its own lane.
inline vu narrow_bits(const bf16* from) { return (vu)load(from) >> 16; }
inline vu narrow_bits(const int8_t* from) { return (vu)load(from) >> 16; }

// Columns of V as strips: [D / 32][tokens / 32][32][32].
template <class T> inline void strips_of_values(const T* const* values, int tokens, int D, bf16* out) {
    for (int first = 0; first < tokens; first += STRIP_TOKENS)
        for (int d = 0; d < D; d += W) {
            vf block[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) {
                const T* const* pair = values + first + 2 * i;
                block[i] = (vf)(narrow_bits(pair[0] + d) | narrow_bits(pair[1] + d) << 16);
            }
            transpose(block);
            bf16* to = out + (int64_t(d / TILE_STRIP) * tokens + first) * TILE_STRIP + d % TILE_STRIP * STRIP_TOKENS;
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store((float*)(to + i * STRIP_TOKENS), block[i]);
        }
}

// Up to TILE_LANES query rows with their running softmax state.
struct TiledRows {
    const char* queries;  // a panel of TILE_LANES outputs and D inputs
    float* mixed;         // [D][TILE_LANES]
    float *most, *sums;   // [TILE_LANES]
    const int32_t* position;
    const float* slopes;  // [TILE_LANES], or null
    int first_position, last_position;
};

// Some tokens, in the form in which a block of rows needs them.
struct TiledTokens {
    const bf16 *keys, *values;               // strips
    const float *key_scales, *value_scales;  // for int8 pages, else null
    int begin, count, padded;
};

// The softmax step for one vector of rows: soft-caps the scores if there is a cap, masks what the rows must not see,
// finds the largest, and writes the weights as pairs of tokens. Returns the factor by which everything before fades.
inline vf weigh(const AttentionCall& call, const TiledRows& rows, const TiledTokens& tokens, int v, float* scores,
                uint32_t* weights) {
    float* column = scores + v * W;
    if (tokens.key_scales)
        for (int t = 0; t < tokens.count; t++)
            store(column + t * TILE_LANES, load(column + t * TILE_LANES) * tokens.key_scales[t]);
    for (int t = 0; t < tokens.count && call.cap_log2; t++) bend(column + t * TILE_LANES, W, call.cap_log2);
    if (rows.slopes)
        lean(column, tokens.count, TILE_LANES, load(rows.slopes + v * W), tokens.begin - load_as<vi>(rows.position + v * W), 1);
    const bool future = tokens.begin + tokens.padded - 1 > rows.first_position || tokens.count < tokens.padded;
    if (future || (call.window && tokens.begin < call.first_seen(rows.last_position))) {
        const vi position = load_as<vi>(rows.position + v * W);
        const vi first = call.window ? call.first_seen(position) : vi{};
        for (int t = 0; t < tokens.padded; t++) {
            vi hidden = position < tokens.begin + t;
            hidden |= first > tokens.begin + t;
            if (t >= tokens.count) hidden = ~vi{};
            store(column + t * TILE_LANES, hidden ? splat(NEVER) : load(column + t * TILE_LANES));
        }
    }
    const vf before = load(rows.most + v * W);
    vf top[2] = {before, before};
    for (int t = 0; t < tokens.padded; t += 2)
        for (int i = 0; i < 2; i++) top[i] = larger(top[i], load(column + (t + i) * TILE_LANES));
    const vf most = larger(top[0], top[1]), fade = exp2v(before - most);
    vf total[2]{};
    for (int t = 0; t < tokens.padded; t += 2) {
        vf p[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            p[i] = exp2_roughly(load(column + (t + i) * TILE_LANES) - most);
            total[i] += p[i];
            if (tokens.value_scales) p[i] = p[i] * tokens.value_scales[t + i];
        }
        store((int32_t*)weights + t / 2 * TILE_LANES + v * W, pairs_of(p[0], p[1]));
    }
    store(rows.most + v * W, most);
    store(rows.sums + v * W, load(rows.sums + v * W) * fade + (total[0] + total[1]));
    return fade;
}

inline void attend_tokens(const AttentionCall& call, const TiledRows& rows, TiledTokens tokens, float* scores,
                          uint32_t* weights) {
    const int D = call.head_dim;
    const int64_t key_bytes = D * int64_t(sizeof(bf16)), strip_values = tokens.padded;
    // tokens that no row of the block sees add nothing
    const int seen = (rows.last_position + TILE_STRIP - tokens.begin) / TILE_STRIP * TILE_STRIP;
    tokens.padded = std::min(tokens.padded, seen);
    tokens.count = std::min(tokens.count, seen);
    const int64_t token_bytes = tokens.padded * int64_t(sizeof(bf16));
    const auto nothing_else = [] {};
    for (int t = 0; t < tokens.padded; t += TILE_STRIP)
        multiply_tiles<BF16S, Strip::KEPT>((const char*)(tokens.keys + int64_t(t) * D), TILE_STRIP, rows.queries, key_bytes,
                                           (char*)(scores + t * TILE_LANES), nullptr, 0, nothing_else);
    vf fade[PANEL_VECS];
    for (int v = 0; v < PANEL_VECS; v++) fade[v] = weigh(call, rows, tokens, v, scores, weights);
    for (int d = 0; d < D; d += TILE_STRIP) {
        multiply_tiles<BF16S, Strip::KEPT>((const char*)(tokens.values + d * strip_values), TILE_STRIP, (const char*)weights,
                                           token_bytes, (char*)scores, nullptr, 0, nothing_else);
        float* mixed = rows.mixed + d * TILE_LANES;
        for (int i = 0; i < TILE_STRIP; i++, mixed += TILE_LANES)
            for (int v = 0; v < PANEL_VECS; v++)
                store(mixed + v * W, load(mixed + v * W) * fade[v] + load(scores + i * TILE_LANES + v * W));
    }
}

template <class T>
void attend_tiles(const AttentionCall& call, const CacheLayer& cache, const Item& item, const Results& results, Scratch& scratch) {
    const int D = call.head_dim, rows = item.count, num_blocks = (rows + TILE_LANES - 1) / TILE_LANES;
    const int32_t* table = call.table(item.seq);
    const int64_t area = int64_t(num_blocks) * TILE_LANES;
    scratch.start(area * (2 * D + D / 2 + 4) + TILE_KEYS * (TILE_LANES + TILE_LANES / 2 + D + 2) + 256);
    float* scores = scratch.take(TILE_KEYS * TILE_LANES);
    uint32_t* weights = scratch.take<uint32_t>(TILE_KEYS / 2 * TILE_LANES);
    bf16 *keys = scratch.take<bf16>(TILE_KEYS * D), *values = scratch.take<bf16>(TILE_KEYS * D);
    float *key_scales = scratch.take(TILE_KEYS), *value_scales = scratch.take(TILE_KEYS);
    uint32_t* queries = scratch.take<uint32_t>(area * D / 2);
    float *mixed = scratch.take(area * D), *turned = scratch.take(area * D);
    float *most = scratch.take(area), *sums = scratch.take(area);
    int32_t* positions = scratch.take<int32_t>(area);
    const float* slopes = slopes_of(call, item, area, scratch.take(area));

    begin_rows(call, item, area, positions, most, sums);
    for (int64_t first = 0; first < area; first += TILE_LANES) {
        const auto row = [&](int i) {
            return first + i < rows ? call.query_row(item.seq, item.kv_head, item.first + int(first) + i) : nullptr;
        };
        for (int i = 0; i < TILE_LANES; i += W)  // a panel: [D / 2][TILE_LANES] pairs
            columns_of_queries(row, i, D, call.scale_log2, TILE_LANES, queries + first * D / 2 + i);
    }
    std::memset(mixed, 0, sizeof(float) * area * D);

    Tiles tiles(TILE_STRIP);
    const T* const nothing = row_of_zeros<T>(D);
    const T* pointers[TILE_KEYS];
    for (int at = item.begin; at < item.end; at += TILE_KEYS) {
        const int count = std::min(TILE_KEYS, item.end - at), padded = (count + TILE_STRIP - 1) / TILE_STRIP * TILE_STRIP;
        const auto scales_of = [&](float* out) {
            for (int t = 0; t < padded; t++) out[t] = row_scale(pointers[t], D);
        };
        for (int t = count; t < padded; t++) pointers[t] = nothing;
        cache.rows(table, item.kv_head, 0, at, count, pointers);
        strips_of_keys(pointers, padded, D, keys);
        if (IS_CODED<T>) scales_of(key_scales);
        cache.rows(table, item.kv_head, 1, at, count, pointers);
        strips_of_values(pointers, padded, D, values);
        if (IS_CODED<T>) scales_of(value_scales);
        const TiledTokens tokens{keys, values, IS_CODED<T> ? key_scales : nullptr, IS_CODED<T> ? value_scales : nullptr,
                                 at, count, padded};
        for (int block = 0; block < num_blocks; block++) {
            const int64_t from = int64_t(block) * TILE_LANES;
            const TiledRows part{(const char*)(queries + from * D / 2), mixed + from * D, most + from, sums + from, positions + from,
                                 slopes ? slopes + from : nullptr, positions[from], positions[from + TILE_LANES - 1]};
            if (at > part.last_position) continue;
            if (call.window && at + count <= call.first_seen(part.first_position)) continue;
            attend_tokens(call, part, tokens, scores, weights);
        }
    }

    for (int first = 0; first < rows; first += TILE_LANES)
        turn_back<TILE_LANES>(mixed + int64_t(first) * D, std::min(TILE_LANES, rows - first), D, turned + int64_t(first) * D);
    results.put(item, turned, most, sums);
}

}  // namespace mooncake
