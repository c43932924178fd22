// Attention of few query rows (decode, drafts): lanes run over keys for scores and over D for mixing, and K and V are streamed
// once.
#pragma once

#include <optional>

#include "mix_tiles.h"
#include "score_tiles.h"

namespace mooncake {

// What one pass mixes and scores: as many sums as registers hold beside what is multiplied, and as many as are needed for
// none to be waited for.
#if defined(__AVX512F__)
constexpr int DOT_ROWS = 6;    // query rows that it mixes
constexpr int SCORE_ROWS = 6;  // query rows that it scores
constexpr int SCORE_VECS = 2;  // vectors of keys
#else
constexpr int DOT_ROWS = 3;
constexpr int SCORE_ROWS = 3;
constexpr int SCORE_VECS = 4;
#endif
constexpr int SCORE_KEYS = SCORE_VECS * W;  // keys in one pass
constexpr int MIX_TILE = 64;                // tokens of V that one pass mixes
constexpr int ROWS_BESIDE_TILES = 6;        // with more query rows the matrix unit also mixes; measured
constexpr int WIDENED_ROWS = 16;            // with more query rows V is widened once for all of them
constexpr int AHEAD_ROWS = ROWS_NEAR == SECOND_CACHE && W == 16 ? 64 : 32;  // rows of K or V to prefetch ahead

// SCORE_KEYS keys as float32 [D][key], without their scales, or as pairs [D / 2][key]. Pairs of bfloat16 are transposed
// as one lane and split afterwards. `keys` has AHEAD_ROWS more entries: as many rows are prefetched as are transposed.
template <class T> inline void turn_keys(const T* const* keys, int D, bool in_pairs, float* turned) {
    for (int first = 0; first < SCORE_KEYS; first += W) {
        float* to = turned + first;
        vf block[W];
        int d = 0;
        if constexpr (std::is_same<T, bf16>::value)
            for (; d + 2 * W <= D; d += 2 * W) {
                bring_near(keys + first + AHEAD_ROWS, W, d, 2 * W);
#pragma GCC unroll 16
                for (int t = 0; t < W; t++) block[t] = load_as<vf>(keys[first + t] + d);
                transpose(block);
                if (in_pairs) {
#pragma GCC unroll 16
                    for (int i = 0; i < W; i++, to += SCORE_KEYS) store(to, block[i]);
                    continue;
                }
#pragma GCC unroll 16
                for (int i = 0; i < W; i++, to += 2 * SCORE_KEYS) {
                    store(to, (vf)((vu)block[i] << 16));
                    store(to + SCORE_KEYS, (vf)((vu)block[i] & 0xffff0000u));
                }
            }
        for (; d < D; d += W) {
            bring_near(keys + first + AHEAD_ROWS, W, d, W);
#pragma GCC unroll 16
            for (int t = 0; t < W; t++) block[t] = load(keys[first + t] + d);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++, to += SCORE_KEYS) store(to, block[i]);
        }
    }
}

// scores[row][0 .. SCORE_KEYS) for ROWS query rows [row][count]. Each is a sum over `count` numbers, or pairs, in the
// same order for any ROWS.
template <int ROWS, bool PAIRS>
void score_rows(const float* query, const float* keys, int count, float* scores, int64_t width) {
    vf acc[ROWS][SCORE_VECS] = {};
    for (int d = 0; d < count; d++, query++, keys += SCORE_KEYS)
        if constexpr (PAIRS || FOLDS_BROADCASTS) {
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < SCORE_VECS; v++)
                    if constexpr (PAIRS)
                        acc[r][v] = add_products(acc[r][v], load_as<uint32_t>(query + r * count), load_as<vi>(keys + v * W));
                    else
                        acc[r][v] += load(keys + v * W) * query[r * count];
        } else {
            vf numbers[ROWS];
            for (int r = 0; r < ROWS; r++) numbers[r] = in_register(splat(query[r * count]));
            for (int v = 0; v < SCORE_VECS; v++) {
                const vf some = in_register(load(keys + v * W));
                for (int r = 0; r < ROWS; r++) acc[r][v] += some * numbers[r];
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < SCORE_VECS; v++) store(scores + r * width + v * W, acc[r][v]);
}

template <bool PAIRS, size_t... I> constexpr auto scores_of(std::index_sequence<I...>) {
    return std::array<void (*)(const float*, const float*, int, float*, int64_t), sizeof...(I)>{score_rows<int(I) + 1, PAIRS>...};
}

template <bool PAIRS> constexpr auto SCORE = scores_of<PAIRS>(std::make_index_sequence<SCORE_ROWS>());

// VECS vectors of a row. bfloat16 comes in pairs, so every two vectors hold the even dimensions and then the odd ones.
template <int VECS, class T> inline void load_values(const T* from, vf (&loaded)[VECS]) {
    if constexpr (std::is_same<T, bf16>::value && VECS % 2 == 0) {
        for (int v = 0; v < VECS; v += 2) {
            const vu pairs = load_as<vu>(from + v * W);
            loaded[v] = (vf)(pairs << 16);
            loaded[v + 1] = (vf)(pairs & 0xffff0000u);
        }
    } else {
        for (int v = 0; v < VECS; v++) loaded[v] = load(from + v * W);
    }
}

// mixed[row][d .. d + VECS * W) += sum over tokens of scores[row][t] * values[t], for ROWS rows, in the order of
// `load_values` until `part_pairs`. `values` has AHEAD_ROWS more entries than `count`, to be prefetched.
template <int ROWS, int VECS, class T>
inline void mix_rows(const float* scores, int64_t score_stride, const T* const* values, int count, int d, float* mixed, int D) {
    constexpr int SOME = FOLDS_BROADCASTS ? VECS : std::min(VECS, 2);
    vf acc[ROWS][VECS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) acc[r][v] = load(mixed + r * D + d + v * W);
    for (int t = 0; t < count; t++) {
        const T* value = values[t] + d;
        bring_near(values + t + AHEAD_ROWS, 1, d, VECS * W);
#pragma GCC unroll 4
        for (int first = 0; first < VECS; first += SOME) {
            vf loaded[SOME];
            load_values(value + first * W, loaded);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const vf p = broadcast(scores + r * score_stride + t);
#pragma GCC unroll 4
                for (int v = 0; v < SOME; v++) acc[r][first + v] += loaded[v] * p;
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) store(mixed + r * D + d + v * W, acc[r][v]);
}

// As `mix_rows`, for a strip of up to STRIP_TOKENS tokens whose weights are bfloat16 numbers, with the bits of mix_in_tiles:
// a matrix unit adds up even and odd tokens of a strip on their own, fused, and adds their sum to what it had.
template <int ROWS, int VECS, class T>
inline void mix_strip_like_tiles(const float* weights, int64_t stride, const T* const* values, int count, int d, float* mixed, int D) {
    vf acc[2][ROWS][VECS] = {};
    for (int t = 0; t < count; t += 2)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            const T* const* value = values + t + odd;  // with a last even token, one of weight 0
            vf loaded[VECS];
            bring_near(value + AHEAD_ROWS, 1, d, VECS * W);
            load_values(*value + d, loaded);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECS; v++) acc[odd][r][v] += loaded[v] * weights[r * stride + t + odd];
        }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) {
            float* to = mixed + r * D + d + v * W;
            store(to, load(to) + (acc[0][r][v] + acc[1][r][v]));
        }
}

// All dimensions of strips that begin at multiples of STRIP_TOKENS of the context.
template <int ROWS, class T>
inline void mix_like_tiles(const float* weights, int64_t stride, const T* const* values, int count, float* mixed, int D) {
    for (int t = 0; t < count; t += STRIP_TOKENS) {
        const int tokens = std::min(STRIP_TOKENS, count - t);
        int d = 0;
        for (; d + 4 * W <= D; d += 4 * W) mix_strip_like_tiles<ROWS, 4>(weights + t, stride, values + t, tokens, d, mixed, D);
        for (; d < D; d += 2 * W) mix_strip_like_tiles<ROWS, 2>(weights + t, stride, values + t, tokens, d, mixed, D);
    }
}

// As `mix_rows`, over pairs of tokens, with bfloat16 weights.
template <int ROWS, int VECS>
inline void mix_pairs(const bf16* weights, int64_t stride, const bf16* const* values, int count, int d, float* mixed, int D) {
    vf acc[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) acc[r][v] = load(mixed + r * D + d + v * W);
    for (int t = 0; t < count; t += 2) {
        const bf16 *first = values[t] + d, *second = values[std::min(t + 1, count - 1)] + d;  // an odd last token's partner has weight 0
        bring_near(values + t + AHEAD_ROWS, std::min(2, count - t), d, VECS * W);
        vi pairs[VECS];
        for (int v = 0; v < VECS; v += 2) pairs_of(first + v * W, second + v * W, pairs + v);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECS; v++)
                acc[r][v] = add_products(acc[r][v], load_as<uint32_t>(weights + r * stride + t), pairs[v]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(mixed + r * D + d + v * W, acc[r][v]);
}

template <int ROWS>
inline void mix_in_pairs(const bf16* weights, int64_t stride, const bf16* const* values, int count, float* mixed, int D) {
    int d = 0;
    for (; d + 4 * W <= D; d += 4 * W) mix_pairs<ROWS, 4>(weights, stride, values, count, d, mixed, D);
    for (; d < D; d += 2 * W) mix_pairs<ROWS, 2>(weights, stride, values, count, d, mixed, D);
}

// Restores the order of dimensions in rows that bfloat16 was mixed into.
inline void part_pairs(float* mixed, int rows, int D) {
    for (int row = 0; row < rows; row++, mixed += D)
        for (int d = 0; d + 2 * W <= D; d += 2 * W) {
            vf both[2] = {load(mixed + d), load(mixed + d + W)};
            interleave(both[0], both[1]);
            store(mixed + d, both[0]);
            store(mixed + d + W, both[1]);
        }
}

template <int ROWS, class T>
inline void mix(const float* scores, int64_t score_stride, const T* const* values, int count, float* mixed, int D) {
    int d = 0;
    for (; d + 4 * W <= D; d += 4 * W) mix_rows<ROWS, 4>(scores, score_stride, values, count, d, mixed, D);
    for (; d + 2 * W <= D; d += 2 * W) mix_rows<ROWS, 2>(scores, score_stride, values, count, d, mixed, D);
    for (; d < D; d += W) mix_rows<ROWS, 1>(scores, score_stride, values, count, d, mixed, D);
}

// Multiplies scores[row][0 .. count) by the scales of `count` keys or values; `count` is a multiple of W.
inline void scale_scores(const int8_t* const* coded, int count, int D, int rows, float* scores, int64_t width) {
    for (int t = 0; t < count; t += W) {
        const vf scales = row_scales(coded + t, D);
        for (float *at = scores + t, *end = at + rows * width; at < end; at += width) store(at, load(at) * scales);
    }
}

// Transposes [row / W][SCORE_KEYS][W] into rows of SCORE_KEYS scores, `width` apart.
inline void turn_scores(const float* tiles, int rows, float* scores, int64_t width) {
#if defined(__AVX512F__)
    if (rows <= 4) {  // a quarter of each vector is in use: join those of 4 keys, 4 apart, and transpose 4 x 4 squares
        for (int t = 0; t < SCORE_KEYS; t += W) {
            __m512 quarters[4];
            for (int i = 0; i < 4; i++) {
                const float* from = tiles + (t + i) * W;
                quarters[i] = _mm512_castps128_ps512(_mm_loadu_ps(from));
                quarters[i] = _mm512_insertf32x4(quarters[i], _mm_loadu_ps(from + 4 * W), 1);
                quarters[i] = _mm512_insertf32x4(quarters[i], _mm_loadu_ps(from + 8 * W), 2);
                quarters[i] = _mm512_insertf32x4(quarters[i], _mm_loadu_ps(from + 12 * W), 3);
            }
            const __m512 low01 = _mm512_unpacklo_ps(quarters[0], quarters[1]), low23 = _mm512_unpacklo_ps(quarters[2], quarters[3]);
            const __m512 high01 = _mm512_unpackhi_ps(quarters[0], quarters[1]), high23 = _mm512_unpackhi_ps(quarters[2], quarters[3]);
            const __m512 turned[4] = {_mm512_shuffle_ps(low01, low23, 0x44), _mm512_shuffle_ps(low01, low23, 0xee),
                                      _mm512_shuffle_ps(high01, high23, 0x44), _mm512_shuffle_ps(high01, high23, 0xee)};
            for (int row = 0; row < rows; row++) _mm512_storeu_ps(scores + row * width + t, turned[row]);
        }
        return;
    }
#endif
    for (int row = 0; row < rows; row += W)
        for (int t = 0; t < SCORE_KEYS; t += W, tiles += W * W) {
            vf block[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) block[i] = load(tiles + i * W);
            transpose(block);
            for (int i = 0; i < std::min(W, rows - row); i++) store(scores + (row + i) * width + t, block[i]);
        }
}

// Where the rows of an item come from.
struct RowPlace {
    int seq, row;
};

inline void places_of(const AttentionCall& call, const AttentionPlan& plan, const Item& item, RowPlace* out) {
    if (!item.is_shared) {
        for (int row = 0; row < item.count; row++) out[row] = {item.seq, item.first + row};
        return;
    }
    for (int row = 0, member = item.first; row < item.count; member++)
        for (int i = 0, rows = call.rows(plan.members[member]); i < rows; i++) out[row++] = {plan.members[member], i};
}

// Calls body(row) for the first row of each group that one pass mixes, with the group's size, up to MOST, as a constant.
template <int MOST = DOT_ROWS, class Body> inline void by_groups(int rows, const Body& body) {
    int row = 0;
    for (; row + MOST <= rows; row += MOST) body(std::integral_constant<int, MOST>{}, row);
    for (; row + 3 <= rows; row += 3) body(std::integral_constant<int, 3>{}, row);
    for (; row + 2 <= rows; row += 2) body(std::integral_constant<int, 2>{}, row);
    for (; row < rows; row++) body(std::integral_constant<int, 1>{}, row);
}

template <class T>
inline void mix_all(const float* scores, int64_t width, const T* const* values, int count, int rows, float* mixed, int D) {
    by_groups(rows, [&](auto group, int row) { mix<group>(scores + row * width, width, values, count, mixed + row * D, D); });
}

inline void mix_all_in_pairs(const bf16* weights, int64_t stride, const bf16* const* values, int count, int rows, float* mixed, int D) {
    by_groups(rows, [&](auto group, int row) {
        mix_in_pairs<group>(weights + row * stride, stride, values, count, mixed + row * D, D);
    });
}

// Rows as float32, without their scales. `rows` has AHEAD_ROWS more entries, to be prefetched.
template <class T> inline void widen_rows(const T* const* rows, int count, int D, float* wide, const float** out) {
    for (int t = 0; t < count; t++, wide += D) {
        bring_near(rows + t + AHEAD_ROWS, 1, 0, D);
        for (int d = 0; d < D; d += W) store(wide + d, load(rows[t] + d));
        out[t] = wide;
    }
}

// `next`: the item this thread will probably do next, or null. Keys, values and the keys of `next` form one stream that
// is prefetched AHEAD_ROWS in advance.
template <class T>
void attend_dots(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, const Item& item,
                 const Item* next, const Results& results, Scratch& scratch) {
    const int D = call.head_dim, rows = item.count;
    const bool is_tiled = fits_tiles<T>(D);
    const int lead = is_tiled ? item.begin % STRIP_TOKENS : 0;  // tokens that nobody sees: see WeightTiles
    const int begin = item.begin - lead, length = item.end - begin;
    const int64_t width = (length + SCORE_KEYS - 1) / SCORE_KEYS * SCORE_KEYS;
    constexpr int MOST = std::max(MIX_TILE, SCORE_KEYS);
    const int32_t* table = call.table(item.seq);
    const bool is_mixed_in_tiles = is_tiled && rows > ROWS_BESIDE_TILES;
    const int tiled_rows = is_tiled ? (rows + W - 1) / W * W : 0, strips = is_mixed_in_tiles ? int(width) / STRIP_TOKENS : 0;
    const int64_t weight_floats = WeightTiles::floats(rows, strips);
    scratch.start(rows * (D + width + 2) + std::max(rows, tiled_rows) * D + MOST * D + tiled_rows * (D / 2 + SCORE_KEYS) +
                  weight_floats + strips * MIX_DIMS * W + 256);
    float *query = scratch.take(rows * D), *mixed = scratch.take(std::max(rows, tiled_rows) * D), *scores = scratch.take(rows * width);
    float *most = scratch.take(rows), *sums = scratch.take(rows);
    float* wide = scratch.take(MOST * D);
    RowPlace places[std::max(SHARED_ROWS, FEW_ROWS)];
    places_of(call, plan, item, places);
    uint32_t* query_tiles = scratch.take<uint32_t>(tiled_rows * D / 2);
    float* score_tiles = scratch.take(tiled_rows * SCORE_KEYS);
    const WeightTiles weights((bf16*)scratch.take(weight_floats), strips);
    uint32_t* value_strips = scratch.take<uint32_t>(strips * MIX_DIMS * W);
    const auto query_row = [&](int row) {
        return row < rows ? call.query_row(places[row].seq, item.kv_head, places[row].row) : nullptr;
    };
    tiles_of_queries(query_row, tiled_rows, D, call.scale_log2, query_tiles);
    const bool in_pairs = works_in_pairs<T>(D);
    const int count = in_pairs ? D / 2 : D;
    for (int row = 0; row < rows && !is_tiled; row++) {
        const float* from = query_row(row);
        for (int d = 0; d < D; d += W) {
            const vf piece = load(from + d) * call.scale_log2;
            if (in_pairs)
                store((bf16*)(query + row * count) + d, piece);
            else
                store(query + row * count + d, piece);
        }
    }
    std::optional<Tiles> tiles;
    if (is_tiled) tiles.emplace(TILE_STRIP);

    const float* wide_tile[MIX_TILE + AHEAD_ROWS];
    std::fill(wide_tile, wide_tile + MIX_TILE + AHEAD_ROWS, wide);
    const T *keys[DOT_PART + SCORE_KEYS + AHEAD_ROWS], *values[DOT_PART + SCORE_KEYS + AHEAD_ROWS];  // with room for what is prefetched past the end
    cache.rows(table, item.kv_head, 0, item.begin, length - lead, keys + lead);
    cache.rows(table, item.kv_head, 1, item.begin, length - lead, values + lead);
    std::fill(keys, keys + lead, keys[lead]);
    std::fill(keys + length, keys + width, keys[lead]);
    const int64_t mixed_tokens = is_tiled ? width : length;
    const T* const nothing = is_tiled ? row_of_zeros<T>(D) : nullptr;
    std::fill(values, values + lead, nothing);
    std::fill(values + length, values + mixed_tokens, nothing);
    std::fill(values + mixed_tokens, values + mixed_tokens + AHEAD_ROWS, values[lead]);
    if (next) {
        const int count = std::min(AHEAD_ROWS, next->end - next->begin);
        cache.rows(call.table(next->seq), next->kv_head, 0, next->begin, count, values + mixed_tokens);
    }
    for (int i = 0; i < AHEAD_ROWS; i++) keys[width + i] = values[i];
    if (next && width + length <= AHEAD_ROWS) {  // all of this item is past when AHEAD_ROWS further is reached
        const int count = std::min(length, next->end - next->begin);
        cache.rows(call.table(next->seq), next->kv_head, 0, next->begin, count, keys + AHEAD_ROWS);
        cache.rows(call.table(next->seq), next->kv_head, 1, next->begin, count, values + AHEAD_ROWS);
    }
    for (int at = 0; at < length; at += SCORE_KEYS) {
        const T* const* tile = keys + at;
        if (is_tiled) {
            score_keys_in_tiles(tile, query_tiles, rows, D, (bf16*)wide, score_tiles, W * sizeof(float), SCORE_KEYS * W,
                                tile + AHEAD_ROWS);
            turn_scores(score_tiles, rows, scores + at, width);
        } else {
            turn_keys(tile, D, in_pairs, wide);
            const auto& score = in_pairs ? SCORE<true> : SCORE<false>;
            for (int row = 0; row < rows; row += SCORE_ROWS)
                score[std::min(SCORE_ROWS, rows - row) - 1](query + row * count, wide, count, scores + row * width + at, width);
        }
        if constexpr (IS_CODED<T>) scale_scores(tile, SCORE_KEYS, D, rows, scores + at, width);
    }
    if (call.cap_log2) bend(scores, rows * width, call.cap_log2);

    for (int row = 0; row < rows; row++) {
        const int position = call.position(places[row].seq, places[row].row);
        const int stop = std::min(length, position + 1 - begin);
        const int start = call.window ? std::max(lead, call.first_seen(position) - begin) : lead;
        float* line = scores + row * width;
        if (call.alibi_slopes) {
            vi distance;
            for (int i = 0; i < W; i++) distance[i] = begin + i - position;
            lean(line, width / W, W, splat(call.slope_log2(item.kv_head, places[row].row)), distance, W);
        }
        for (int t = 0; t < std::min(start, length); t++) line[t] = NEVER;
        for (int64_t t = std::max(stop, 0); t < width; t++) line[t] = NEVER;
        vf top[SCORE_VECS];
        std::fill(top, top + SCORE_VECS, splat(NEVER));
        for (int t = 0; t < width; t += SCORE_KEYS)
            for (int v = 0; v < SCORE_VECS; v++) top[v] = larger(top[v], load(line + t + v * W));
        for (int v = 1; v < SCORE_VECS; v++) top[0] = larger(top[0], top[v]);
        most[row] = largest(top[0]);
    }
    for (int row = 0; row < rows; row++) {  // separate from the first loop, so that no row waits for its largest score
        float* line = scores + row * width;
        vf total{};
        for (int t = 0; t < width; t += W) {
            const vf below = load(line + t) - most[row], p = in_pairs || is_tiled ? exp2_roughly(below) : exp2v(below);
            if (is_mixed_in_tiles && !IS_CODED<T>)
                weights.put(row, t, p);
            else if (is_tiled && !IS_CODED<T>)
                store(line + t, rounded(p));
            else if (in_pairs)
                store((bf16*)line + t, p);  // overwrites scores already read
            else
                store(line + t, p);
            total += p;
        }
        sums[row] = sum(total);
    }

    if constexpr (!std::is_same<T, float>::value)
        if (is_mixed_in_tiles) {
            const auto weigh_strip = [&](int strip) {
                for (int t = strip * STRIP_TOKENS, end = t + STRIP_TOKENS; t < end && IS_CODED<T>; t += W) {
                    const vf scales = row_scales(values + t, D);
                    for (int row = 0; row < rows; row++) weights.put(row, t, load(scores + row * width + t) * scales);
                }
            };
            mix_in_tiles(weights, rows, values, AHEAD_ROWS, D, value_strips, mixed, weigh_strip);
            for (int row = 0; row < rows; row++) in_order<T>(mixed + row * D, D, mixed + row * D);
            return results.put(item, mixed, most, sums);
        }
    std::memset(mixed, 0, sizeof(float) * rows * D);
    for (int at = 0; at < length; at += MIX_TILE) {
        const int tokens = std::min(MIX_TILE, length - at);
        const T* const* tile = values + at;
        if constexpr (std::is_same<T, bf16>::value)
            if (in_pairs) {
                mix_all_in_pairs((const bf16*)scores + at, 2 * width, tile, tokens, rows, mixed, D);
                continue;
            }
        if constexpr (IS_CODED<T>)  // fold the scales into the weights
            scale_scores(tile, (tokens + W - 1) / W * W, D, rows, scores + at, width);
        if (is_tiled) {
            for (int row = 0; row < rows && IS_CODED<T>; row++)
                for (int t = 0; t < tokens; t += W) {
                    float* some = scores + row * width + at + t;
                    store(some, rounded(load(some)));
                }
            by_groups<3>(rows, [&](auto group, int row) {
                mix_like_tiles<group>(scores + row * width + at, width, tile, tokens, mixed + row * D, D);
            });
            continue;
        }
        if (rows > WIDENED_ROWS && !std::is_same<T, float>::value) {
            widen_rows(tile, tokens, D, wide, wide_tile);
            mix_all(scores + at, width, wide_tile, tokens, rows, mixed, D);
        } else {
            mix_all(scores + at, width, tile, tokens, rows, mixed, D);
        }
    }
    if (std::is_same<T, bf16>::value && rows <= WIDENED_ROWS && !in_pairs) part_pairs(mixed, rows, D);
    results.put(item, mixed, most, sums);
}

}  // namespace mooncake
