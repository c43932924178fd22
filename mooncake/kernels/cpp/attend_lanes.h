// Attention of many query rows of one sequence (chunks): lanes run over query rows, so all of scores, softmax and mixing is
// vertical; K and V are read by broadcast, in place, and stay in L1 for all rows of a query block.
#pragma once

#include "attention_plan.h"

namespace mooncake {

#if defined(__AVX512F__)
constexpr int LANE_VECS = 4;  // vectors of query rows that one pass holds
#else
constexpr int LANE_VECS = 2;
#endif
constexpr int LANES = W * LANE_VECS;  // query rows in one row block
constexpr int TILE = 32;              // tokens of K and V that stay in L1 between uses

// As attend_lanes needs them: float32 rows. float32 pages are used where they lie, others are widened into `wide`.
template <class T> inline void float_rows(const T* const* rows, int count, int D, float* wide, const float** out) {
    if constexpr (std::is_same<T, float>::value) {
        std::copy(rows, rows + count, out);
    } else {
        for (int t = 0; t < count; t++, wide += D) {
            const float scale = row_scale(rows[t], D);
            for (int d = 0; d < D; d += W) store(wide + d, IS_CODED<T> ? load(rows[t] + d) * scale : load(rows[t] + d));
            out[t] = wide;
        }
    }
}

// scores[t][lane] = sum over d of keys[t][d] * query[d][lane], for KEYS keys and VECS * W lanes.
template <int KEYS, int VECS> inline void score_keys(const float* query, const float* const* keys, int D, float* scores) {
    vf acc[KEYS][VECS] = {};
    for (int d = 0; d < D; d++) {
        vf q[VECS];
        for (int v = 0; v < VECS; v++) q[v] = load(query + (d * VECS + v) * W);
        for (int t = 0; t < KEYS; t++)
            for (int v = 0; v < VECS; v++) acc[t][v] += q[v] * keys[t][d];
    }
    for (int t = 0; t < KEYS; t++)
        for (int v = 0; v < VECS; v++) store(scores + (t * VECS + v) * W, acc[t][v]);
}

// mixed[d][lane] = faded(mixed[d][lane], vector of the lane) + sum over t of values[t][d] * scores[t][lane], for DIMS of d.
template <int DIMS, int VECS, class Fade>
inline void mix_dims(const float* scores, const float* const* values, int count, int d, const Fade& faded, float* mixed) {
    vf acc[DIMS][VECS];
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) acc[i][v] = faded(load(mixed + ((d + i) * VECS + v) * W), v);
    for (int t = 0; t < count; t++) {
        const float* value = values[t] + d;
        vf p[VECS];
        for (int v = 0; v < VECS; v++) p[v] = load(scores + (t * VECS + v) * W);
        for (int i = 0; i < DIMS; i++)
            for (int v = 0; v < VECS; v++) acc[i][v] += p[v] * value[i];
    }
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) store(mixed + ((d + i) * VECS + v) * W, acc[i][v]);
}

// Up to LANES query rows, transposed, with the running state of their softmax.
struct RowBlock {
    float *query, *mixed;     // [D][LANES]
    float *most, *sums;       // [LANES]
    int32_t* position;        // [LANES]; of padding, that of the last real row
    int first_position, last_position;
};

inline void attend_tile(const RowBlock& rows, const float* const* keys, const float* const* values, int begin, int count,
                        int window, int D, float* scores) {
    for (int t = 0; t < count; t += 4) score_keys<4, LANE_VECS>(rows.query, keys + t, D, scores + t * LANES);
    const bool future = begin + count - 1 > rows.first_position;
    const bool past = window && begin <= rows.last_position - window;
    vf fade[LANE_VECS];
    for (int v = 0; v < LANE_VECS; v++) {
        float* column = scores + v * W;
        if (future || past) {
            vi position;
            std::memcpy(&position, rows.position + v * W, sizeof position);
            for (int t = 0; t < count; t++) {
                vi hidden = position < begin + t;
                if (window) hidden |= position >= begin + t + window;
                store(column + t * LANES, hidden ? splat(NEVER) : load(column + t * LANES));
            }
        }
        const vf before = load(rows.most + v * W);
        vf most = before;
        for (int t = 0; t < count; t++) most = larger(most, load(column + t * LANES));
        fade[v] = exp2v(before - most);
        vf total = load(rows.sums + v * W) * fade[v];
        for (int t = 0; t < count; t++) {
            vf p = exp2v(load(column + t * LANES) - most);
            store(column + t * LANES, p);
            total += p;
        }
        store(rows.most + v * W, most);
        store(rows.sums + v * W, total);
    }
    const auto faded = [&](vf mixed, int v) { return mixed * fade[v]; };
    for (int d = 0; d < D; d += 4) mix_dims<4, LANE_VECS>(scores, values, count, d, faded, rows.mixed);
}

// State of an item's rows before the first token; rows behind its last one, up to `area`, stand where that stands.
inline void begin_rows(const AttentionCall& call, const Item& item, int64_t area, int32_t* positions, float* most, float* sums) {
    for (int row = 0; row < area; row++) {
        positions[row] = call.position(item.seq, item.first + std::min(row, item.count - 1));
        most[row] = NEVER;
        sums[row] = 0;
    }
}

template <class T>
void attend_lanes(const AttentionCall& call, const CacheLayer& cache, const Item& item, const Results& results, Scratch& scratch) {
    const int D = call.head_dim, rows = item.count, num_blocks = (rows + LANES - 1) / LANES;
    const int32_t* table = call.table(item.seq);
    const int64_t area = int64_t(num_blocks) * LANES;
    scratch.start(area * (2 * D + 3) + TILE * (LANES + 2 * D) + 256);
    float *scores = scratch.take(TILE * LANES), *wide_keys = scratch.take(TILE * D), *wide_values = scratch.take(TILE * D);
    float *queries = scratch.take(area * D), *mixed = scratch.take(area * D);
    float *most = scratch.take(area), *sums = scratch.take(area);
    int32_t* positions = scratch.take<int32_t>(area);

    begin_rows(call, item, area, positions, most, sums);
    for (int row = 0; row < area; row++) {
        float* column = queries + int64_t(row / LANES) * LANES * D + row % LANES;
        const float* from = call.query_row(item.seq, item.kv_head, item.first + std::min(row, rows - 1));
        for (int d = 0; d < D; d++) column[d * LANES] = row < rows ? from[d] * call.scale_log2 : 0;
    }
    std::memset(mixed, 0, sizeof(float) * area * D);

    const T* pointers[TILE];
    const float *keys[TILE + 3], *values[TILE];
    for (int at = item.begin; at < item.end; at += TILE) {
        const int count = std::min(TILE, item.end - at);
        cache.rows(table, item.kv_head, 0, at, count, pointers);
        float_rows(pointers, count, D, wide_keys, keys);
        for (int t = count; t % 4; t++) keys[t] = keys[0];  // scored and ignored
        cache.rows(table, item.kv_head, 1, at, count, pointers);
        float_rows(pointers, count, D, wide_values, values);
        for (int block = 0; block < num_blocks; block++) {
            const int64_t from = int64_t(block) * LANES;
            RowBlock part{queries + from * D, mixed + from * D, most + from, sums + from, positions + from,
                          positions[from], positions[from + LANES - 1]};
            if (at > part.last_position) continue;
            if (call.window && at + count <= part.first_position - call.window + 1) continue;
            attend_tile(part, keys, values, at, count, call.window, D, scores);
        }
    }

    float* turned = queries;  // no longer needed
    for (int row = 0; row < rows; row++) {
        const float* column = mixed + int64_t(row / LANES) * LANES * D + row % LANES;
        for (int d = 0; d < D; d++) turned[int64_t(row) * D + d] = column[d * LANES];
    }
    results.put(item, turned, most, sums);
}

}  // namespace mooncake
