// The plan of one step's attention: work items, the parts that long contexts are split into, and how a row's parts are
// merged. Shape letters are those of reference.py.
#pragma once

#include <atomic>
#include <cmath>
#include <tuple>
#include <vector>

#include "pages.h"
#include "pool.h"
#include "steps.h"
#include "tiles.h"

namespace mooncake {

constexpr int BLOCK_ROWS = 128;   // query rows that share a pass over K and V, where G allows
constexpr int DOT_PART = 256;     // context tokens in a part, for few rows
constexpr int TILES_PART = 2048;  // and for many on a matrix unit
constexpr int WHOLE = 1 << 30;    // attend_lanes takes all of a context, part by part
constexpr int FEW_ROWS = BLOCK_ROWS;  // up to this many of a sequence attend_dots is faster than attend_lanes; measured
constexpr int FEW_BESIDE_TILES = 32;  // and than attend_tiles
constexpr int SHARED_ROWS = 48;   // most query rows of several sequences that read a shared part together
constexpr float NEVER = -1e30f;   // score of a masked token; finite, so that differences are numbers
constexpr int STRIP_TOKENS = ROW_UNIT / int(sizeof(bf16));  // tokens, or dimensions, in a tile row

// Whether a matrix unit takes pages of this type.
template <class T> inline bool fits_tiles(int head_dim) {
    return !std::is_same<T, float>::value && W == TILE_ROWS && head_dim % STRIP_TOKENS == 0 && has_tiles();
}

// ---- the work list --------------------------------------------------------------------------------------------------

struct AttentionCall {
    const float* query;
    int64_t query_stride;  // from token to token; heads of a token are adjacent
    float* output;         // [T, Hq, D], contiguous
    const int32_t *block_tables, *query_starts, *context_lens;
    int64_t table_stride;
    int num_sequences, num_heads, num_kv_heads, head_dim;
    int window;           // as in reference.paged_attention: > 0 slides, < 0 is a chunk of -window tokens, 0 is none
    float scale_log2;     // scale * log2(e)
    float cap_log2 = 0;   // scores are soft-capped to ± this / log2(e); 0: no cap
    const int32_t* positions = nullptr;  // [T], of each sequence's queries in rising order; null: queries end the context
    float* log_sums = nullptr;                 // [T, Hq], log of the sum of a row's weights before division; null: not wanted
    const float* sinks = nullptr;              // [Hq]: scores of extra tokens whose values are zeros; null: none
    const float* alibi_slopes = nullptr;       // [Hq]: what scores lose per token between key and query; null: nothing

    int group() const { return num_heads / num_kv_heads; }
    int tokens(int seq) const { return query_starts[seq + 1] - query_starts[seq]; }
    int rows(int seq) const { return tokens(seq) * group(); }
    const int32_t* table(int seq) const { return block_tables + seq * table_stride; }

    // Position in its sequence of a query row's token; past the end, a row sees what the last token sees.
    int position(int seq, int row) const {
        if (!positions) return context_lens[seq] - tokens(seq) + row / group();
        return std::min(positions[query_starts[seq] + row / group()], context_lens[seq] - 1);
    }

    // The first token that one at `position` sees with a window; of a vector of positions, each one's. May be negative.
    template <class P> P first_seen(P position) const {
        return window < 0 ? position - position % -window : position - (window - 1);
    }

    const float* query_row(int seq, int kv_head, int row) const {
        return query + (query_starts[seq] + row / group()) * query_stride + (kv_head * group() + row % group()) * head_dim;
    }

    int64_t place(int seq, int kv_head, int row) const {
        return (query_starts[seq] + int64_t(row / group())) * num_heads + kv_head * group() + row % group();
    }
    float* output_row(int seq, int kv_head, int row) const { return output + place(seq, kv_head, row) * head_dim; }

    // In log2, like the scores.
    float slope_log2(int kv_head, int row) const { return alibi_slopes[kv_head * group() + row % group()] * 1.44269504f; }

    // `most` is in log2, like the scores.
    void put_log_sum(int seq, int kv_head, int row, float most, float sum) const {
        if (log_sums) log_sums[place(seq, kv_head, row)] = (most + std::log2(sum)) * 0.693147181f;
    }

    // `sum` of the weights of a row's tokens plus that of its sink. The sink is only counted here, once all parts are
    // merged.
    float with_sink(int kv_head, int row, float most, float sum) const {
        return sinks ? sum + std::exp2(sinks[kv_head * group() + row % group()] * 1.44269504f - most) : sum;
    }
};

// Soft-caps `count` scores, a multiple of W.
inline void bend(float* scores, int64_t count, float cap_log2) {
    for (float* end = scores + count; scores < end; scores += W) store(scores, cap_log2 * tanhv(load(scores) / cap_log2));
}

// ALiBi: adds to `count` vectors of scores, `stride` apart, what their keys' distances make of them. Lanes are keys or rows:
// `distance` is key minus query of each lane of the first vector, and grows by `step` from one to the next. Not inlined, so
// that every method computes the same bits, and calls without slopes the code that they had.
[[gnu::noinline]] inline void lean(float* scores, int64_t count, int64_t stride, vf slopes, vi distance, int step) {
    for (int64_t i = 0; i < count; i++, scores += stride, distance += step)
        store(scores, load(scores) + slopes * __builtin_convertvector(distance, vf));
}

// Query rows of one KV head against context tokens begin .. end. Row r of a sequence is query head r % G of the group,
// at the sequence's query token r / G, so rows fill vectors for any G.
//
// Either rows first .. first + count of sequence `seq`; or, for a shared part, all rows of the sequences members[first]
// .. , `count` rows in total, `seq` being one of those sequences.
struct Item {
    int seq, kv_head, first, count, begin, end;
    int part;        // index of this part of its rows' context
    bool is_shared;
};

// Unmerged parts of the same query rows. Part p has its unnormalised output [rows, D] at offset + p * stride, then the
// rows' largest scores, then their sums.
struct Merge {
    int64_t offset, stride;
    int rows, parts;
};

// All of one step's attention; the same for every layer.
struct AttentionPlan {
    std::vector<Item> items;
    std::vector<Merge> merges;      // by (block of rows, KV head); see merge_of
    std::vector<int> first_merge;   // of each sequence; -1 if its rows have one part
    std::vector<int> members;
    int few_rows = FEW_ROWS;        // of a sequence, for attend_dots
    int64_t merge_floats = 0;
    int64_t cost = 0;  // multiply-adds / D

    int merge_of(const AttentionCall& call, int seq, int kv_head, int first_row) const {
        const int first = first_merge[seq];
        return first < 0 ? -1 : first + first_row / BLOCK_ROWS * call.num_kv_heads + kv_head;
    }
};

class Planner {
public:
    Planner(const AttentionCall& call, const CacheLayer& cache, AttentionPlan& plan)
        : call_(call), block_tokens_(cache.block_tokens), plan_(plan) {
        with_pages(cache.kind, [&](auto page) { in_tiles_ = fits_tiles<decltype(page)>(call.head_dim); });
        plan_.few_rows = in_tiles_ ? FEW_BESIDE_TILES : FEW_ROWS;
    }

    void run() {
        plan_.items.clear();
        plan_.merges.clear();
        plan_.members.clear();
        plan_.first_merge.assign(call_.num_sequences, -1);
        plan_.merge_floats = plan_.cost = 0;
        shared_parts_.assign(call_.num_sequences, 0);
        find_shared_parts();
        for (int seq = 0; seq < call_.num_sequences; seq++) add_sequence(seq);
        // Long items first, so that the last ones to finish are short. Of equal ones, parts of the same queries follow each
        // other, and so do those of a sequence, whose heads lie side by side.
        std::stable_sort(plan_.items.begin(), plan_.items.end(), [](const Item& a, const Item& b) {
            const int64_t long_a = int64_t(a.count) * (a.end - a.begin), long_b = int64_t(b.count) * (b.end - b.begin);
            const int head_a = a.is_shared ? a.kv_head : -1, head_b = b.is_shared ? b.kv_head : -1;
            return std::tie(long_b, head_a) < std::tie(long_a, head_b);
        });
    }

private:
    bool has_few_rows(int seq) const { return call_.rows(seq) <= plan_.few_rows; }

    void add_sequence(int seq) {
        const int rows = call_.rows(seq), part_tokens = has_few_rows(seq) ? DOT_PART : in_tiles_ ? TILES_PART : WHOLE;
        bool has_parts = false;
        for (int first = 0; first < rows; first += BLOCK_ROWS) has_parts |= num_parts(seq, first, part_tokens) > 1;
        if (has_parts) plan_.first_merge[seq] = int(plan_.merges.size());
        for (int first = 0; first < rows; first += BLOCK_ROWS) {
            const int count = std::min(BLOCK_ROWS, rows - first), parts = num_parts(seq, first, part_tokens);
            for (int head = 0; head < call_.num_kv_heads; head++) {
                if (has_parts) add_merge(count, parts);
                for (int part = shared_parts_[seq]; part < parts; part++) {
                    const int from = first_token(seq, first), place = (from / part_tokens + part) * part_tokens;
                    const int end = std::min(place + part_tokens, end_token(seq, first));
                    add({seq, head, first, count, std::max(place, from), end, part, false});
                }
            }
        }
    }

    void add(const Item& item) {
        plan_.items.push_back(item);
        plan_.cost += int64_t(item.count) * (item.end - item.begin);
    }

    void add_merge(int rows, int parts) {
        constexpr int LINE = 16;  // floats: threads write adjacent parts, and would take their lines from each other
        const int64_t stride = (int64_t(rows) * (call_.head_dim + 2) + LINE - 1) / LINE * LINE;
        plan_.merges.push_back({plan_.merge_floats, stride, rows, parts});
        plan_.merge_floats += stride * parts;
    }

    // Parts lie on a grid and begin at a multiple of W, so that sums over what a row sees have the same order whichever row
    // its item begins with. Blocks before the first token that is seen may be gone.
    int first_token(int seq, int first_row) const {
        if (!call_.window) return 0;
        const int first = std::max(0, call_.first_seen(call_.position(seq, first_row)));
        return std::max(first / W * W, first / block_tokens_ * block_tokens_);
    }
    int end_token(int seq, int first_row) const {
        return call_.position(seq, std::min(first_row + BLOCK_ROWS, call_.rows(seq)) - 1) + 1;
    }
    int num_parts(int seq, int first_row, int part_tokens) const {
        return (end_token(seq, first_row) + part_tokens - 1) / part_tokens - first_token(seq, first_row) / part_tokens;
    }

    // Walks the tree of common prefixes level by level: sequences that share part p share all parts before it.
    void find_shared_parts() {
        if (call_.window) return;
        std::vector<std::vector<int>> groups(1), next;
        for (int seq = 0; seq < call_.num_sequences; seq++)
            if (has_few_rows(seq) && call_.rows(seq) <= SHARED_ROWS) groups[0].push_back(seq);
        for (int part = 0; !groups.empty(); part++, groups.swap(next)) {
            next.clear();
            for (std::vector<int>& group : groups) divide(group, part, next);
        }
    }

    // Splits `group` by the members' blocks of this part; those that share them with another member get items for the
    // part.
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
    bool in_tiles_ = false;
    AttentionPlan& plan_;
    std::vector<int> shared_parts_;  // of each sequence
};

// How a part of a row's context joins those before it: by the largest scores so far and its own, lane by lane. Parts are
// folded in order, however they were computed, so that rows have the same bits with every method.
struct Fold {
    vf most, fade, share;

    Fold() = default;
    Fold(vf before, vf part) : most(larger(before, part)), fade(exp2v(before - most)), share(exp2v(part - most)) {}

    // Only one of the products is fused with the sum, and always this one.
    vf operator()(vf before, vf part) const { return in_register(before * fade) + part * share; }
};

// ---- results --------------------------------------------------------------------------------------------------------

struct Results {
    const AttentionCall& call;
    const AttentionPlan& plan;
    float* partial;
    std::atomic<int>* missing;  // parts still missing, one counter per merge
    uint64_t call_number;       // of this process

    // `mixed` is [rows, D], not yet divided by `sums`; `most` is in log2.
    void put(const Item& item, const float* mixed, const float* most, const float* sums) const {
        if (!item.is_shared) return put_rows(item, item.seq, item.first, item.count, mixed, most, sums);
        by_members(item, [&](int seq, int row, int rows) {
            put_rows(item, seq, 0, rows, mixed + row * call.head_dim, most + row, sums + row);
        });
    }

    // Where each row of a shared part belongs, for those who write it themselves and then `finish`. Such a part is never
    // the only one of its rows.
    void places(const Item& item, float** out) const {
        by_members(item, [&](int seq, int row, int rows) {
            float* mine = part_of(item, plan.merge_of(call, seq, item.kv_head, 0));
            for (int i = 0; i < rows; i++) out[row + i] = mine + i * call.head_dim;
        });
    }
    void finish(const Item& item, const float* most, const float* sums) const {
        by_members(item, [&](int seq, int row, int rows) { finish_rows(item, seq, 0, rows, most + row, sums + row); });
    }

private:
    // Calls body(sequence, its first row of the item, its rows) for the members of a shared part.
    template <class Body> void by_members(const Item& item, const Body& body) const {
        for (int row = 0, member = item.first; row < item.count; member++) {
            const int seq = plan.members[member], rows = call.rows(seq);
            body(seq, row, rows);
            row += rows;
        }
    }

    float* part_of(const Item& item, int merge) const {
        return partial + plan.merges[merge].offset + plan.merges[merge].stride * item.part;
    }

    void put_rows(const Item& item, int seq, int first, int rows, const float* mixed, const float* most, const float* sums) const {
        const int D = call.head_dim, index = plan.merge_of(call, seq, item.kv_head, first);
        if (index < 0) {
            for (int row = 0; row < rows; row++) {
                float* out = call.output_row(seq, item.kv_head, first + row);
                const float inverse = 1.0f / call.with_sink(item.kv_head, first + row, most[row], sums[row]);
                for (int d = 0; d < D; d += W) store(out + d, load(mixed + row * D + d) * inverse);
                call.put_log_sum(seq, item.kv_head, first + row, most[row], sums[row]);
            }
            return;
        }
        float* mine = part_of(item, index);
        for (int64_t i = 0; i < int64_t(rows) * D; i += W) store(mine + i, load(mixed + i));
        finish_rows(item, seq, first, rows, most, sums);
    }

    void finish_rows(const Item& item, int seq, int first, int rows, const float* most, const float* sums) const {
        const int index = plan.merge_of(call, seq, item.kv_head, first);
        float* rest = part_of(item, index) + rows * call.head_dim;
        for (int i = 0; i < rows; i++) {
            rest[i] = most[i];
            rest[rows + i] = sums[i];
        }
        if (missing[index].fetch_sub(1, std::memory_order_acq_rel) == 1) join(plan.merges[index], seq, item.kv_head, first);
    }

    void join(const Merge& merge, int seq, int kv_head, int first) const {
        const int D = call.head_dim, rows = merge.rows;
        const float* parts = partial + merge.offset;
        for (int row = 0; row < rows; row++) {
            float* out = call.output_row(seq, kv_head, first + row);
            const float *mixed = parts + row * D, *rest = parts + rows * D + row;
            std::copy(mixed, mixed + D, out);
            vf most = splat(rest[0]), total = splat(rest[rows]);
            for (int p = 1; p < merge.parts; p++) {
                mixed += merge.stride, rest += merge.stride;
                const Fold fold(most, splat(rest[0]));
                most = fold.most;
                total = fold(total, splat(rest[rows]));
                for (int d = 0; d < D; d += W) store(out + d, fold(load(out + d), load(mixed + d)));
            }
            const float inverse = 1.0f / call.with_sink(kv_head, first + row, most[0], total[0]);
            for (int d = 0; d < D; d += W) store(out + d, load(out + d) * inverse);
            call.put_log_sum(seq, kv_head, first + row, most[0], total[0]);
        }
    }
};

}  // namespace mooncake
