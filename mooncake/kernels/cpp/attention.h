// Paged attention that reads pages where they lie. Letters for shapes are those of reference.py.
//
// Two ways, chosen by how many query rows (tokens times G) read the same keys:
//   few rows (decode)   `attend_dots`   lanes run over keys for the scores, over D for the mixing: K and V stream by once, for
//                                       the G rows of a sequence or for those of all sequences that share the part
//   many rows (chunks)  `attend_lanes`  lanes run over query rows: all of scores, softmax and mixing is vertical, K and V are
//                                       read by broadcast, in place, and stay in L1 for all rows of a query block
// Long contexts are cut into parts whose borders depend on the sequence alone, never on threads or batch; whoever finishes
// a row's last part merges them in order. So a result does not depend on the number of threads or on the neighbours.
#pragma once

#include <atomic>
#include <vector>

#include "pages.h"
#include "pool.h"
#include "steps.h"

namespace mooncake {

#if defined(__AVX512F__)
constexpr int LANE_VECS = 4;  // vectors of query rows that one pass of attend_lanes holds
constexpr int DOT_ROWS = 6;  // query rows that one pass of attend_dots mixes
#else
constexpr int LANE_VECS = 2;
constexpr int DOT_ROWS = 2;
#endif

constexpr int LANES = W * LANE_VECS;    // query rows in one row block of attend_lanes
constexpr int BLOCK_ROWS = 128;         // query rows that share a pass over K and V, where G allows
constexpr int TILE = 32;                // tokens of K and V that stay in L1 between uses of attend_lanes
constexpr int FEW_ROWS = 16;            // up to here attend_dots is faster; measured
constexpr int SCORE_ROWS = 6;           // query rows that one pass of attend_dots scores
constexpr int MIX_TILE = 64;            // tokens of V that attend_dots mixes in one pass
constexpr int SCORE_VECS = 2;
constexpr int SCORE_KEYS = SCORE_VECS * W;  // against so many keys
constexpr int DOT_PART = 256;           // tokens of context in a part
constexpr int LANE_PART = 2048;
constexpr int SHARED_ROWS = 48;         // most query rows of several sequences that are taken through a shared part at once
constexpr float NEVER = -1e30f;         // score of a token that must not be seen; finite, so that differences are numbers

// ---- the work list --------------------------------------------------------------------------------------------------

struct AttentionCall {
    const float* query;
    int64_t query_stride;  // from token to token; heads of a token are adjacent
    float* output;         // [T, Hq, D], contiguous
    const int32_t *block_tables, *query_starts, *context_lens;
    int64_t table_stride;
    int num_sequences, num_heads, num_kv_heads, head_dim, window;
    float scale_log2;  // scale * log2(e)

    int group() const { return num_heads / num_kv_heads; }
    int tokens(int seq) const { return query_starts[seq + 1] - query_starts[seq]; }
    int rows(int seq) const { return tokens(seq) * group(); }
    const int32_t* table(int seq) const { return block_tables + seq * table_stride; }

    // Where in its sequence the token of a query row is.
    int position(int seq, int row) const { return context_lens[seq] - tokens(seq) + row / group(); }

    const float* query_row(int seq, int kv_head, int row) const {
        return query + (query_starts[seq] + row / group()) * query_stride + (kv_head * group() + row % group()) * head_dim;
    }

    float* output_row(int seq, int kv_head, int row) const {
        return output + ((query_starts[seq] + int64_t(row / group())) * num_heads + kv_head * group() + row % group()) * head_dim;
    }
};

// Some query rows of one KV head against context tokens begin .. end. Row r of a sequence is query head r % G of the group,
// of the sequence's query token r / G: so rows pack vectors fully, whatever G is.
//
// Either rows first .. first + count of sequence `seq`; or, for a shared part, all rows of the sequences
// members[first] .. , `count` rows in all, `seq` being one of those.
struct Item {
    int seq, kv_head, first, count, begin, end;
    int part;        // which part of its rows' context this is
    bool is_shared;
};

// Parts of the same query rows, unmerged. Part p has its unnormalised output [rows, D] at offset + p * stride, then rows of
// largest scores, then rows of sums.
struct Merge {
    int64_t offset, stride;
    int rows, parts;
};

// What one step's attention consists of; the same for every layer.
struct AttentionPlan {
    std::vector<Item> items;
    std::vector<Merge> merges;      // by (block of rows, KV head); see merge_of
    std::vector<int> first_merge;   // of each sequence; -1 when its rows have one part
    std::vector<int> members;
    int64_t merge_floats = 0;
    int64_t cost = 0;  // multiply-adds / D

    int merge_of(const AttentionCall& call, int seq, int kv_head, int first_row) const {
        const int first = first_merge[seq];
        return first < 0 ? -1 : first + first_row / BLOCK_ROWS * call.num_kv_heads + kv_head;
    }
};

class Planner {
public:
    Planner(const AttentionCall& call, int block_tokens, AttentionPlan& plan) : call_(call), block_tokens_(block_tokens), plan_(plan) {}

    void run() {
        plan_.items.clear();
        plan_.merges.clear();
        plan_.members.clear();
        plan_.first_merge.assign(call_.num_sequences, -1);
        plan_.merge_floats = plan_.cost = 0;
        shared_parts_.assign(call_.num_sequences, 0);
        find_shared_parts();
        for (int seq = 0; seq < call_.num_sequences; seq++) add_sequence(seq);
        // Long items first, so that the last ones to finish are short.
        std::sort(plan_.items.begin(), plan_.items.end(), [](const Item& a, const Item& b) {
            return int64_t(a.count) * (a.end - a.begin) > int64_t(b.count) * (b.end - b.begin);
        });
    }

private:
    bool has_few_rows(int seq) const { return call_.rows(seq) <= FEW_ROWS; }

    void add_sequence(int seq) {
        const int rows = call_.rows(seq), part_tokens = has_few_rows(seq) ? DOT_PART : LANE_PART;
        bool has_parts = false;
        for (int first = 0; first < rows; first += BLOCK_ROWS) has_parts |= num_parts(seq, first, part_tokens) > 1;
        if (has_parts) plan_.first_merge[seq] = int(plan_.merges.size());
        for (int first = 0; first < rows; first += BLOCK_ROWS) {
            const int count = std::min(BLOCK_ROWS, rows - first), parts = num_parts(seq, first, part_tokens);
            for (int head = 0; head < call_.num_kv_heads; head++) {
                if (has_parts) add_merge(count, parts);
                for (int part = shared_parts_[seq]; part < parts; part++) {
                    const int begin = first_token(seq, first) + part * part_tokens;
                    add({seq, head, first, count, begin, std::min(begin + part_tokens, end_token(seq, first)), part, false});
                }
            }
        }
    }

    void add(const Item& item) {
        plan_.items.push_back(item);
        plan_.cost += int64_t(item.count) * (item.end - item.begin);
    }

    void add_merge(int rows, int parts) {
        const int64_t stride = int64_t(rows) * (call_.head_dim + 2);
        plan_.merges.push_back({plan_.merge_floats, stride, rows, parts});
        plan_.merge_floats += stride * parts;
    }

    int first_token(int seq, int first_row) const {
        return call_.window ? std::max(0, call_.position(seq, first_row) - call_.window + 1) : 0;
    }
    int end_token(int seq, int first_row) const {
        return call_.position(seq, std::min(first_row + BLOCK_ROWS, call_.rows(seq)) - 1) + 1;
    }
    int num_parts(int seq, int first_row, int part_tokens) const {
        return (end_token(seq, first_row) - first_token(seq, first_row) + part_tokens - 1) / part_tokens;
    }

    // Level by level down the tree of common beginnings: who shares part p shares all parts before it.
    void find_shared_parts() {
        if (call_.window) return;
        std::vector<std::vector<int>> groups(1), next;
        for (int seq = 0; seq < call_.num_sequences; seq++)
            if (has_few_rows(seq)) groups[0].push_back(seq);
        for (int part = 0; !groups.empty(); part++, groups.swap(next)) {
            next.clear();
            for (std::vector<int>& group : groups) divide(group, part, next);
        }
    }

    // The members of `group` by their blocks of this part; those that share it with another get items for it.
    void divide(const std::vector<int>& group, int part, std::vector<std::vector<int>>& out) {
        const int end = (part + 1) * DOT_PART;
        const int from = part * DOT_PART / block_tokens_, to = (end + block_tokens_ - 1) / block_tokens_;
        std::vector<int> left;
        for (int seq : group)
            if (call_.position(seq, 0) >= end) left.push_back(seq);
        while (left.size() > 1) {
            const int32_t* wanted = call_.table(left[0]);
            const auto same = [&](int seq) { return std::equal(wanted + from, wanted + to, call_.table(seq) + from); };
            const auto split = std::stable_partition(left.begin(), left.end(), same);
            std::vector<int> together(left.begin(), split);
            left.erase(left.begin(), split);
            if (together.size() < 2) continue;
            add_shared(together, part);
            out.push_back(std::move(together));
        }
    }

    void add_shared(const std::vector<int>& together, int part) {
        const int begin = part * DOT_PART;
        for (size_t i = 0; i < together.size();) {
            const int first = int(plan_.members.size());
            int rows = 0;
            for (; i < together.size() && (rows == 0 || rows + call_.rows(together[i]) <= SHARED_ROWS); i++) {
                rows += call_.rows(together[i]);
                plan_.members.push_back(together[i]);
                shared_parts_[together[i]] = part + 1;
            }
            for (int head = 0; head < call_.num_kv_heads; head++)
                add({plan_.members[first], head, first, rows, begin, begin + DOT_PART, part, true});
        }
    }

    const AttentionCall& call_;
    const int block_tokens_;
    AttentionPlan& plan_;
    std::vector<int> shared_parts_;  // of each sequence
};

// ---- results --------------------------------------------------------------------------------------------------------

struct Results {
    const AttentionCall& call;
    const AttentionPlan& plan;
    float* partial;
    std::atomic<int>* missing;  // parts, one a merge

    // `mixed` is [rows, D], not yet divided by `sums`; scores are in log2.
    void put(const Item& item, const float* mixed, const float* most, const float* sums) const {
        if (!item.is_shared) return put_rows(item, item.seq, item.first, item.count, mixed, most, sums);
        for (int row = 0, member = item.first; row < item.count; member++) {
            const int seq = plan.members[member], rows = call.rows(seq);
            put_rows(item, seq, 0, rows, mixed + row * call.head_dim, most + row, sums + row);
            row += rows;
        }
    }

    void put_rows(const Item& item, int seq, int first, int rows, const float* mixed, const float* most, const float* sums) const {
        const int D = call.head_dim, index = plan.merge_of(call, seq, item.kv_head, first);
        if (index < 0) {
            for (int row = 0; row < rows; row++) {
                float* out = call.output_row(seq, item.kv_head, first + row);
                const float inverse = 1.0f / sums[row];
                for (int d = 0; d < D; d += W) store(out + d, load(mixed + row * D + d) * inverse);
            }
            return;
        }
        const Merge& merge = plan.merges[index];
        float* mine = partial + merge.offset + merge.stride * item.part;
        std::memcpy(mine, mixed, sizeof(float) * rows * D);
        std::memcpy(mine + rows * D, most, sizeof(float) * rows);
        std::memcpy(mine + rows * (D + 1), sums, sizeof(float) * rows);
        if (missing[index].fetch_sub(1, std::memory_order_acq_rel) == 1) join(merge, seq, item.kv_head, first);
    }

    void join(const Merge& merge, int seq, int kv_head, int first) const {
        const int D = call.head_dim, rows = merge.rows;
        const float* parts = partial + merge.offset;
        static thread_local std::vector<float> weights;
        weights.resize(merge.parts);
        for (int row = 0; row < rows; row++) {
            float most = NEVER, total = 0;
            for (int p = 0; p < merge.parts; p++) most = std::max(most, parts[p * merge.stride + rows * D + row]);
            for (int p = 0; p < merge.parts; p++) {
                weights[p] = exp2s(parts[p * merge.stride + rows * D + row] - most);
                total += weights[p] * parts[p * merge.stride + rows * (D + 1) + row];
            }
            float* out = call.output_row(seq, kv_head, first + row);
            for (int d = 0; d < D; d += W) {
                vf acc{};
                for (int p = 0; p < merge.parts; p++) acc += load(parts + p * merge.stride + row * D + d) * weights[p];
                store(out + d, acc * (1.0f / total));
            }
        }
    }
};

// ---- few query rows: lanes over D -----------------------------------------------------------------------------------

// SCORE_KEYS keys as float32 [D][key], without their scales. Pairs of bfloat16 are turned as one lane and parted behind it.
template <class T> inline void turn_keys(const T* const* keys, int D, float* turned) {
    for (int first = 0; first < SCORE_KEYS; first += W) {
        float* to = turned + first;
        vf block[W];
        int d = 0;
        if constexpr (std::is_same<T, bf16>::value)
            for (; d + 2 * W <= D; d += 2 * W) {
#pragma GCC unroll 16
                for (int t = 0; t < W; t++) block[t] = load_as<vf>(keys[first + t] + d);
                transpose(block);
#pragma GCC unroll 16
                for (int i = 0; i < W; i++, to += 2 * SCORE_KEYS) {
                    store(to, (vf)((vu)block[i] << 16));
                    store(to + SCORE_KEYS, (vf)((vu)block[i] & 0xffff0000u));
                }
            }
        for (; d < D; d += W) {
#pragma GCC unroll 16
            for (int t = 0; t < W; t++) block[t] = load(keys[first + t] + d);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++, to += SCORE_KEYS) store(to, block[i]);
        }
    }
}

// scores[row][0 .. SCORE_KEYS) of ROWS query rows [row][D]: each a sum over D in order, whatever ROWS is.
template <int ROWS> void score_rows(const float* query, const float* keys, int D, float* scores, int64_t width) {
    vf acc[ROWS][SCORE_VECS] = {};
    for (int d = 0; d < D; d++, query++, keys += SCORE_KEYS)
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < SCORE_VECS; v++) acc[r][v] += load(keys + v * W) * query[r * D];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < SCORE_VECS; v++) store(scores + r * width + v * W, acc[r][v]);
}

constexpr void (*SCORE[])(const float*, const float*, int, float*, int64_t) = {score_rows<1>, score_rows<2>, score_rows<3>,
                                                                              score_rows<4>, score_rows<5>, score_rows<6>};
static_assert(sizeof SCORE == SCORE_ROWS * sizeof *SCORE);

// mixed[row][d .. d + VECS * W) += sum over tokens of scores[row][t] * values[t], for ROWS rows.
template <int ROWS, int VECS, class T>
inline void mix_rows(const float* scores, int64_t score_stride, const T* const* values, int count, int d, float* mixed, int D) {
    vf acc[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) acc[r][v] = load(mixed + r * D + d + v * W);
    for (int t = 0; t < count; t++) {
        const T* value = values[t] + d;
        vf loaded[VECS];
        for (int v = 0; v < VECS; v++) loaded[v] = load(value + v * W);
        for (int r = 0; r < ROWS; r++) {
            const float p = scores[r * score_stride + t];
            for (int v = 0; v < VECS; v++) acc[r][v] += loaded[v] * p;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(mixed + r * D + d + v * W, acc[r][v]);
}

template <int ROWS, class T>
inline void mix(const float* scores, int64_t score_stride, const T* const* values, int count, float* mixed, int D) {
    int d = 0;
    for (; d + 4 * W <= D; d += 4 * W) mix_rows<ROWS, 4>(scores, score_stride, values, count, d, mixed, D);
    for (; d + 2 * W <= D; d += 2 * W) mix_rows<ROWS, 2>(scores, score_stride, values, count, d, mixed, D);
    for (; d < D; d += W) mix_rows<ROWS, 1>(scores, score_stride, values, count, d, mixed, D);
}

// scores[row][0 .. count) times the scales of `count` keys or values, a multiple of W.
inline void scale_scores(const int8_t* const* coded, int count, int D, int rows, float* scores, int64_t width) {
    for (int t = 0; t < count; t += W) {
        vf scales;
        for (int i = 0; i < W; i++) scales[i] = row_scale(coded[t + i], D);
        for (float *at = scores + t, *end = at + rows * width; at < end; at += width) store(at, load(at) * scales);
    }
}

// The rows of an item, wherever they come from.
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

template <class T>
inline void mix_all(const float* scores, int64_t width, const T* const* values, int count, int rows, float* mixed, int D) {
    int row = 0;
    for (; row + DOT_ROWS <= rows; row += DOT_ROWS)
        mix<DOT_ROWS>(scores + row * width, width, values, count, mixed + row * D, D);
    for (; row + 3 <= rows; row += 3) mix<3>(scores + row * width, width, values, count, mixed + row * D, D);
    for (; row + 2 <= rows; row += 2) mix<2>(scores + row * width, width, values, count, mixed + row * D, D);
    for (; row < rows; row++) mix<1>(scores + row * width, width, values, count, mixed + row * D, D);
}

// Rows as float32, without their scales.
template <class T> inline void widen_rows(const T* const* rows, int count, int D, float* wide, const float** out) {
    for (int t = 0; t < count; t++, wide += D) {
        for (int d = 0; d < D; d += W) store(wide + d, load(rows[t] + d));
        out[t] = wide;
    }
}

template <class T>
void attend_dots(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, const Item& item,
                 const Results& results, Scratch& scratch) {
    const int D = call.head_dim, rows = item.count, length = item.end - item.begin;
    const int64_t width = (length + SCORE_KEYS - 1) / SCORE_KEYS * SCORE_KEYS;
    constexpr int MOST = std::max(MIX_TILE, SCORE_KEYS);
    const int32_t* table = call.table(item.seq);
    scratch.start(int64_t(rows) * (2 * D + width + 2) + MOST * D + 128);
    float *query = scratch.take(rows * D), *mixed = scratch.take(rows * D), *scores = scratch.take(rows * width);
    float *most = scratch.take(rows), *sums = scratch.take(rows);
    float* wide = scratch.take(MOST * D);
    const auto prefetch = [&](int kv, int at, int count) {
        cache.template prefetch<T>(table, item.kv_head, kv, item.begin + at, std::min(count, length - at));
    };
    RowPlace places[std::max(SHARED_ROWS, FEW_ROWS)];
    places_of(call, plan, item, places);
    for (int row = 0; row < rows; row++) {
        const float* from = call.query_row(places[row].seq, item.kv_head, places[row].row);
        for (int d = 0; d < D; d += W) store(query + row * D + d, load(from + d) * call.scale_log2);
    }

    const T* tile[MOST];
    const float* wide_tile[MOST];
    for (int at = 0; at < length; at += SCORE_KEYS) {
        const int count = std::min(SCORE_KEYS, length - at);
        cache.rows(table, item.kv_head, 0, item.begin + at, count, tile);
        prefetch(0, at + SCORE_KEYS, SCORE_KEYS);
        for (int t = count; t < SCORE_KEYS; t++) tile[t] = tile[0];
        turn_keys(tile, D, wide);
        for (int row = 0; row < rows; row += SCORE_ROWS)
            SCORE[std::min(SCORE_ROWS, rows - row) - 1](query + row * D, wide, D, scores + row * width + at, width);
        if constexpr (IS_CODED<T>) scale_scores(tile, SCORE_KEYS, D, rows, scores + at, width);
    }

    prefetch(1, 0, MIX_TILE);
    for (int row = 0; row < rows; row++) {
        const int position = call.position(places[row].seq, places[row].row);
        const int stop = std::min(length, position + 1 - item.begin);
        const int start = call.window ? std::max(0, position + 1 - call.window - item.begin) : 0;
        float* line = scores + row * width;
        for (int t = 0; t < std::min(start, length); t++) line[t] = NEVER;
        for (int64_t t = std::max(stop, 0); t < width; t++) line[t] = NEVER;
        vf top[SCORE_VECS];
        std::fill(top, top + SCORE_VECS, splat(NEVER));
        for (int t = 0; t < width; t += SCORE_KEYS)
            for (int v = 0; v < SCORE_VECS; v++) top[v] = larger(top[v], load(line + t + v * W));
        most[row] = largest(larger(top[0], top[1]));
    }
    for (int row = 0; row < rows; row++) {  // apart from the first pass: so no row waits for its largest score
        float* line = scores + row * width;
        vf total{};
        for (int t = 0; t < width; t += W) {
            vf p = exp2v(load(line + t) - most[row]);
            store(line + t, p);
            total += p;
        }
        sums[row] = sum(total);
    }

    std::memset(mixed, 0, sizeof(float) * rows * D);
    for (int at = 0; at < length; at += MIX_TILE) {
        const int count = std::min(MIX_TILE, length - at);
        cache.rows(table, item.kv_head, 1, item.begin + at, count, tile);
        prefetch(1, at + MIX_TILE, MIX_TILE);
        if constexpr (IS_CODED<T>) {  // the weights take the scales along
            for (int t = count; t % W; t++) tile[t] = tile[0];
            scale_scores(tile, (count + W - 1) / W * W, D, rows, scores + at, width);
        }
        if (rows > FEW_ROWS && !std::is_same<T, float>::value) {
            widen_rows(tile, count, D, wide, wide_tile);
            mix_all(scores + at, width, wide_tile, count, rows, mixed, D);
        } else {
            mix_all(scores + at, width, tile, count, rows, mixed, D);
        }
    }
    results.put(item, mixed, most, sums);
}

// ---- many query rows: lanes over rows -------------------------------------------------------------------------------

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

template <class T> void attend(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, int threads) {
    static thread_local Scratch partial;
    static thread_local std::vector<std::atomic<int>> missing;
    if (missing.size() < plan.merges.size()) missing = std::vector<std::atomic<int>>(2 * plan.merges.size());
    for (size_t i = 0; i < plan.merges.size(); i++) missing[i].store(plan.merges[i].parts, std::memory_order_relaxed);
    const Results results{call, plan, partial.start(plan.merge_floats), missing.data()};
    parallel(int64_t(plan.items.size()), plan.cost * call.head_dim < (1 << 16) ? 1 : threads, [&](int64_t i) {
        static thread_local Scratch scratch;
        const Item& item = plan.items[i];
        if (item.is_shared || call.rows(item.seq) <= FEW_ROWS)
            attend_dots<T>(call, plan, cache, item, results, scratch);
        else
            attend_lanes<T>(call, cache, item, results, scratch);
    });
}

inline int check_tables(const AttentionCall& call, const CacheLayer& cache) {
    for (int seq = 0; seq < call.num_sequences; seq++) {
        const int blocks = (call.context_lens[seq] + cache.block_tokens - 1) / cache.block_tokens;
        if (blocks > call.table_stride) return BAD_BLOCK;
        if (call.tokens(seq) > call.context_lens[seq]) return BAD_POSITION;
        for (int i = 0; i < blocks; i++)
            if (call.table(seq)[i] < 0 || call.table(seq)[i] >= cache.num_blocks) return BAD_BLOCK;
    }
    return OK;
}

}  // namespace mooncake
