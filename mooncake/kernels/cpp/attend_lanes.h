// Attention of many query rows of one sequence (chunks): lanes run over query rows, so scores, softmax and mixing are
// all vertical; K and V are broadcast in place, and stay in L1 for all rows of a query block.
#pragma once

#include "score_tiles.h"

namespace mooncake {

#if defined(__AVX512F__)
constexpr int LANE_VECS = 4;  // vectors of query rows that one pass holds
#else
constexpr int LANE_VECS = 2;
#endif
constexpr int LANES = W * LANE_VECS;  // query rows in one row block
constexpr int LANE_KEYS = 4;          // keys, or elements of V, in one pass
constexpr int LANE_TILE = 64;         // tokens between updates of the largest scores

// Rows as float32, as attend_lanes needs them. float32 pages are used in place; others are widened into `wide`.
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

// These inner loops are functions of their own because GCC spills what they hold where more is alive.

// scores[t][lane] = sum over d of keys[t][d] * query[d][lane], for KEYS keys and VECS * W lanes.
template <int KEYS, int VECS>
[[gnu::noinline]] void score_keys(const float* query, const float* const* keys, int D, float* scores) {
    vf acc[KEYS][VECS] = {};
    for (int d = 0; d < D; d++) {
        vf q[VECS];
        for (int v = 0; v < VECS; v++) q[v] = in_register(load(query + (d * VECS + v) * W));
        for (int t = 0; t < KEYS; t++)
            for (int v = 0; v < VECS; v++) acc[t][v] += q[v] * keys[t][d];
    }
    for (int t = 0; t < KEYS; t++)
        for (int v = 0; v < VECS; v++) store(scores + (t * VECS + v) * W, acc[t][v]);
}

// mixed[d][lane] = faded(mixed[d][lane], the lane's vector) + sum over t of values[t][d] * scores[t][lane], for DIMS
// values of d.
template <int DIMS, int VECS, class Fade>
[[gnu::noinline]] void mix_dims(const float* scores, const float* const* values, int count, int d, const Fade& faded, float* mixed) {
    vf acc[DIMS][VECS];
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) acc[i][v] = faded(load(mixed + ((d + i) * VECS + v) * W), v);
    for (int t = 0; t < count; t++) {
        const float* value = values[t] + d;
        vf p[VECS];
        for (int v = 0; v < VECS; v++) p[v] = in_register(load(scores + (t * VECS + v) * W));
        for (int i = 0; i < DIMS; i++)
            for (int v = 0; v < VECS; v++) acc[i][v] += p[v] * value[i];
    }
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) store(mixed + ((d + i) * VECS + v) * W, acc[i][v]);
}

// scores[t][lane] for KEYS keys and VECS * W lanes, over pairs of bfloat16: queries are [D / 2][lane], keys are read in
// place. Raises `most`, the largest score of each lane, if it is not null: in memory, as no register is to spare.
template <int KEYS, int VECS>
[[gnu::noinline]] void score_pairs(const uint32_t* query, const bf16* const* keys, int D, float* scores, float* most = nullptr) {
    vf acc[KEYS][VECS] = {};
    const bf16* key[KEYS];
    std::copy(keys, keys + KEYS, key);
    for (int64_t d = 0; d < D; d += 2, query += VECS * W) {
        vi q[VECS];
        for (int v = 0; v < VECS; v++) q[v] = in_register(load_as<vi>(query + v * W));
        for (int t = 0; t < KEYS; t++)
            for (int v = 0; v < VECS; v++) acc[t][v] = add_products(acc[t][v], load_as<uint32_t>(key[t] + d), q[v]);
    }
    for (int v = 0; v < VECS; v++) {
        vf top = most ? load(most + v * W) : splat(0);
        for (int t = 0; t < KEYS; t++) {
            store(scores + (t * VECS + v) * W, acc[t][v]);
            top = larger(top, acc[t][v]);
        }
        if (most) store(most + v * W, top);
    }
}

// As `mix_dims`, over pairs of tokens: values are [pair][D], weights [2 * pair][lane].
template <int DIMS, int VECS, class Fade>
[[gnu::noinline]] void mix_dims_in_pairs(const float* weights, const uint32_t* values, int count, int d, int D, const Fade& faded,
                              float* mixed) {
    vf acc[DIMS][VECS];
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) acc[i][v] = faded(load(mixed + ((d + i) * VECS + v) * W), v);
    for (int t = 0; t < count; t += 2, values += D) {
        vi p[VECS];
        for (int v = 0; v < VECS; v++) p[v] = in_register(load_as<vi>(weights + (t * VECS + v) * W));
        for (int i = 0; i < DIMS; i++)
            for (int v = 0; v < VECS; v++) acc[i][v] = add_products(acc[i][v], values[d + i], p[v]);
    }
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) store(mixed + ((d + i) * VECS + v) * W, acc[i][v]);
}

inline void put_pairs(const bf16* first, const bf16* second, int D, uint32_t* out) {
    for (int d = 0; d < D; d += 2 * W) {
        vi pairs[2];
        pairs_of(first + d, second + d, pairs);
        for (int i = 0; i < 2; i++) store((int32_t*)out + d + i * W, pairs[i]);
    }
}

// Transposes [D][STRIDE] into `count` rows of D.
template <int STRIDE> inline void turn_back(const float* mixed, int count, int D, float* out) {
    for (int first = 0; first < count; first += W)
        for (int d = 0; d < D; d += W) {
            vf block[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) block[i] = load(mixed + (d + i) * STRIDE + first);
            transpose(block);
            for (int i = 0; i < std::min(W, count - first); i++) store(out + (first + i) * D + d, block[i]);
        }
}

// Up to LANES query rows, transposed, with their running softmax state.
struct RowBlock {
    float *query, *mixed;     // [D][LANES]; as pairs, query is [D / 2][LANES]
    float *most, *sums;       // [LANES]
    int32_t* position;        // [LANES]; padding has the last real row's
    const float* slopes;      // [LANES], as AttentionCall::slope_log2; null: none
    int first_position, last_position;
};

// Tokens as float32 rows.
struct FloatTile {
    const float *keys[LANE_TILE + LANE_KEYS - 1], *values[LANE_TILE];

    void score(const RowBlock& rows, int t, int D, float* scores) const { score_keys<LANE_KEYS, LANE_VECS>(rows.query, keys + t, D, scores); }
    static vf power(vf x) { return exp2v(x); }
    void keep(float* weight, vf first, vf second, bool has_second) const {
        store(weight, first);
        if (has_second) store(weight + LANES, second);
    }
    template <class Fade> void mix(const RowBlock& rows, const float* weights, int count, int D, const Fade& faded) const {
        for (int d = 0; d < D; d += LANE_KEYS) mix_dims<LANE_KEYS, LANE_VECS>(weights, values, count, d, faded, rows.mixed);
    }
};

// Tokens as pairs of bfloat16: keys in place, values [pair][D].
struct PairTile {
    const bf16* keys[LANE_TILE + LANE_KEYS - 1];
    const uint32_t* values;

    void score(const RowBlock& rows, int t, int D, float* scores) const {
        score_pairs<LANE_KEYS, LANE_VECS>((const uint32_t*)rows.query, keys + t, D, scores);
    }
    static vf power(vf x) { return exp2_roughly(x); }
    void keep(float* weight, vf first, vf second, bool) const { store((int32_t*)weight, pairs_of(first, second)); }
    template <class Fade> void mix(const RowBlock& rows, const float* weights, int count, int D, const Fade& faded) const {
        for (int d = 0; d < D; d += LANE_KEYS) mix_dims_in_pairs<LANE_KEYS, LANE_VECS>(weights, values, count, d, D, faded, rows.mixed);
    }
};

template <class Tile>
void attend_tile(const AttentionCall& call, const RowBlock& rows, const Tile& tile, int begin, int count, float* scores) {
    const int D = call.head_dim;
    for (int t = 0; t < count; t += LANE_KEYS) tile.score(rows, t, D, scores + t * LANES);
    if (call.cap_log2) bend(scores, count * LANES, call.cap_log2);
    for (int v = 0; v < LANE_VECS && rows.slopes; v++)
        lean(scores + v * W, count, LANES, load(rows.slopes + v * W), begin - load_as<vi>(rows.position + v * W), 1);
    const bool future = begin + count - 1 > rows.first_position;
    const bool past = call.window && begin < call.first_seen(rows.last_position);
    vf fade[LANE_VECS];
    for (int v = 0; v < LANE_VECS; v++) {
        float* column = scores + v * W;
        if (future || past) {
            vi position;
            std::memcpy(&position, rows.position + v * W, sizeof position);
            const vi first = call.window ? call.first_seen(position) : vi{};
            for (int t = 0; t < count; t++) {
                vi hidden = position < begin + t;
                hidden |= first > begin + t;
                store(column + t * LANES, hidden ? splat(NEVER) : load(column + t * LANES));
            }
        }
        const vf before = load(rows.most + v * W);
        vf most = larger(before, load(column)), others = load(column + (count - 1) * LANES);  // two, as each waits for itself
        for (int t = 1; t + 1 < count; t += 2) {
            most = larger(most, load(column + t * LANES));
            others = larger(others, load(column + (t + 1) * LANES));
        }
        most = larger(most, others);
        fade[v] = exp2v(before - most);
        vf total = load(rows.sums + v * W) * fade[v];
        for (int t = 0; t < count; t += 2) {
            const bool has_second = t + 1 < count;
            const vf first = Tile::power(load(column + t * LANES) - most);
            const vf second = has_second ? Tile::power(load(column + (t + 1) * LANES) - most) : vf{};
            tile.keep(column + t * LANES, first, second, has_second);
            total += first;
            total += second;
        }
        store(rows.most + v * W, most);
        store(rows.sums + v * W, total);
    }
    const auto faded = [&](vf mixed, int v) { return mixed * fade[v]; };
    tile.mix(rows, scores, count, D, faded);
}

// State of an item's rows before the first token. Padding rows, up to `area`, have the position of the last real row.
inline void begin_rows(const AttentionCall& call, const Item& item, int64_t area, int32_t* positions, float* most, float* sums) {
    for (int row = 0; row < area; row++) {
        positions[row] = call.position(item.seq, item.first + std::min(row, item.count - 1));
        most[row] = NEVER;
        sums[row] = 0;
    }
}

// The slopes of an item's rows, up to `area`, if the call has any.
inline const float* slopes_of(const AttentionCall& call, const Item& item, int64_t area, float* out) {
    if (!call.alibi_slopes) return nullptr;
    for (int row = 0; row < area; row++) out[row] = call.slope_log2(item.kv_head, item.first + row);
    return out;
}

template <class T>
void attend_lanes(const AttentionCall& call, const CacheLayer& cache, const Item& item, const Results& results, Scratch& scratch) {
    const int D = call.head_dim, rows = item.count, num_blocks = (rows + LANES - 1) / LANES;
    const int32_t* table = call.table(item.seq);
    const int64_t area = int64_t(num_blocks) * LANES;
    scratch.start(area * (2 * D + 4) + LANE_TILE * (LANES + 2 * D) + 256);
    float *scores = scratch.take(LANE_TILE * LANES), *wide_keys = scratch.take(LANE_TILE * D), *wide_values = scratch.take(LANE_TILE * D);
    float *queries = scratch.take(area * D), *mixed = scratch.take(area * D);
    float *most = scratch.take(area), *sums = scratch.take(area);
    int32_t* positions = scratch.take<int32_t>(area);
    const float* slopes = slopes_of(call, item, area, scratch.take(area));

    begin_rows(call, item, area, positions, most, sums);
    const bool in_pairs = works_in_pairs<T>(D);
    const auto query_row = [&](int row) { return row < rows ? call.query_row(item.seq, item.kv_head, item.first + row) : nullptr; };
    for (int64_t from = 0; from < area && in_pairs; from += W)
        columns_of_queries(query_row, int(from), D, call.scale_log2, LANES,
                           (uint32_t*)queries + from / LANES * LANES * D + from % LANES);
    for (int row = 0; row < area && !in_pairs; row++) {
        float* column = queries + int64_t(row / LANES) * LANES * D + row % LANES;
        const float* from = query_row(row);
        for (int d = 0; d < D; d++) column[d * LANES] = from ? from[d] * call.scale_log2 : 0;
    }
    std::memset(mixed, 0, sizeof(float) * area * D);

    const T *keys[LANE_TILE], *values[LANE_TILE];
    FloatTile floats;
    PairTile pairs;
    for (int at = item.begin; at < item.end; at += LANE_TILE) {
        const int count = std::min(LANE_TILE, item.end - at);
        cache.rows(table, item.kv_head, 0, at, count, keys);
        cache.rows(table, item.kv_head, 1, at, count, values);
        if constexpr (std::is_same<T, bf16>::value)
            if (in_pairs) {
                std::copy(keys, keys + count, pairs.keys);
                std::fill(pairs.keys + count, pairs.keys + LANE_TILE + LANE_KEYS - 1, keys[0]);  // scored but ignored
                for (int t = 0; t < count; t += 2)
                    put_pairs(values[t], values[std::min(t + 1, count - 1)], D, (uint32_t*)wide_values + t / 2 * D);
                pairs.values = (const uint32_t*)wide_values;
            }
        if (!in_pairs) {
            float_rows(keys, count, D, wide_keys, floats.keys);
            std::fill(floats.keys + count, floats.keys + LANE_TILE + LANE_KEYS - 1, floats.keys[0]);
            float_rows(values, count, D, wide_values, floats.values);
        }
        for (int block = 0; block < num_blocks; block++) {
            const int64_t from = int64_t(block) * LANES;
            RowBlock part{queries + from * D, mixed + from * D, most + from, sums + from, positions + from,
                          slopes ? slopes + from : nullptr, positions[from], positions[from + LANES - 1]};
            if (at > part.last_position) continue;
            if (call.window && at + count <= call.first_seen(part.first_position)) continue;
            if (in_pairs)
                attend_tile(call, part, pairs, at, count, scores);
            else
                attend_tile(call, part, floats, at, count, scores);
        }
    }

    float* turned = queries;  // no longer needed
    for (int first = 0; first < rows; first += LANES)
        turn_back<LANES>(mixed + int64_t(first) * D, std::min(LANES, rows - first), D, turned + int64_t(first) * D);
    results.put(item, turned, most, sums);
}

}  // namespace mooncake
