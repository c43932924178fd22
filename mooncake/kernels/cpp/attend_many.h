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

// scores[t][lane] = sum over d of keys[t][d] * query[d][lane], for 4 keys.
inline void score_four(const float* query, const float* const* keys, int D, float* scores) {
    vf acc[4][LANE_VECS] = {};
    for (int d = 0; d < D; d++) {
        for (int v = 0; v < LANE_VECS; v++) {
            vf q = load(query + d * LANES + v * W);
            for (int t = 0; t < 4; t++) acc[t][v] += q * keys[t][d];
        }
    }
    for (int t = 0; t < 4; t++)
        for (int v = 0; v < LANE_VECS; v++) store(scores + t * LANES + v * W, acc[t][v]);
}

// mixed[d][lane] = mixed[d][lane] * fade[lane] + sum over t of values[t][d] * scores[t][lane], for 4 of d.
inline void mix_four(const float* scores, const float* const* values, int count, int d, const vf* fade, float* mixed) {
    vf acc[4][LANE_VECS];
    for (int i = 0; i < 4; i++)
        for (int v = 0; v < LANE_VECS; v++) acc[i][v] = load(mixed + (d + i) * LANES + v * W) * fade[v];
    for (int t = 0; t < count; t++) {
        const float* value = values[t] + d;
        for (int v = 0; v < LANE_VECS; v++) {
            vf p = load(scores + t * LANES + v * W);
            for (int i = 0; i < 4; i++) acc[i][v] += p * value[i];
        }
    }
    for (int i = 0; i < 4; i++)
        for (int v = 0; v < LANE_VECS; v++) store(mixed + (d + i) * LANES + v * W, acc[i][v]);
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
    for (int t = 0; t < count; t += 4) score_four(rows.query, keys + t, D, scores + t * LANES);
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
    for (int d = 0; d < D; d += 4) mix_four(scores, values, count, d, fade, rows.mixed);
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

    for (int row = 0; row < area; row++) {
        const int real = item.first + std::min(row, rows - 1);
        positions[row] = call.position(item.seq, real);
        most[row] = NEVER;
        sums[row] = 0;
        float* column = queries + int64_t(row / LANES) * LANES * D + row % LANES;
        const float* from = call.query_row(item.seq, item.kv_head, real);
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
