// Attention of many query rows of one sequence (chunks): lanes run over query rows, so scores, softmax and mixing are
// all vertical; K and V are broadcast in place, and stay in L1 for all rows of a query block. Every row gets the bits that
// attend_dots would give it: the same parts, sums in the same order, parts folded alike.
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
constexpr int LANE_TILE = 64;         // tokens of K and V that stay in L1 between uses

// These inner loops are functions of their own because GCC spills what they hold where more is alive.

// scores[t][lane] = sum over d of keys[t][d] * query[d][lane], for KEYS keys and VECS * W lanes.
template <int KEYS, int VECS>
[[gnu::noinline]] void score_keys(const float* query, const float* const* keys, int D, float* scores) {
    vf acc[KEYS][VECS] = {};
    for (int d = 0; d < D; d++) {
        if constexpr (KEYS < VECS && !FOLDS_BROADCASTS) {
            vf key[KEYS];
            for (int t = 0; t < KEYS; t++) key[t] = in_register(splat(keys[t][d]));
            for (int v = 0; v < VECS; v++) {
                const vf q = in_register(load(query + (d * VECS + v) * W));
                for (int t = 0; t < KEYS; t++) acc[t][v] += q * key[t];
            }
        } else {
            vf q[VECS];
            for (int v = 0; v < VECS; v++) q[v] = in_register(load(query + (d * VECS + v) * W));
            for (int t = 0; t < KEYS; t++)
                for (int v = 0; v < VECS; v++) acc[t][v] += q[v] * keys[t][d];
        }
    }
    for (int t = 0; t < KEYS; t++)
        for (int v = 0; v < VECS; v++) store(scores + (t * VECS + v) * W, acc[t][v]);
}

// mixed[d][lane] += sum over t of values[t][d] * scores[t][lane], for DIMS values of d.
template <int DIMS, int VECS>
[[gnu::noinline]] void mix_dims(const float* scores, const float* const* values, int count, int d, float* mixed) {
    vf acc[DIMS][VECS];
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) acc[i][v] = load(mixed + ((d + i) * VECS + v) * W);
    for (int t = 0; t < count; t++) {
        const float* value = values[t] + d;
        if constexpr (DIMS < VECS && !FOLDS_BROADCASTS) {
            vf each[DIMS];
            for (int i = 0; i < DIMS; i++) each[i] = in_register(splat(value[i]));
            for (int v = 0; v < VECS; v++) {
                const vf p = in_register(load(scores + (t * VECS + v) * W));
                for (int i = 0; i < DIMS; i++) acc[i][v] += p * each[i];
            }
        } else {
            vf p[VECS];
            for (int v = 0; v < VECS; v++) p[v] = in_register(load(scores + (t * VECS + v) * W));
            for (int i = 0; i < DIMS; i++)
                for (int v = 0; v < VECS; v++) acc[i][v] += p[v] * value[i];
        }
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

// As `mix_dims`, over pairs of tokens: values are [pair][D], weights [pair][lane].
template <int DIMS, int VECS>
[[gnu::noinline]] void mix_dims_in_pairs(const float* weights, const uint32_t* values, int pairs, int d, int D, float* mixed) {
    vf acc[DIMS][VECS];
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) acc[i][v] = load(mixed + ((d + i) * VECS + v) * W);
    for (int pair = 0; pair < pairs; pair++, values += D) {
        vi p[VECS];
        for (int v = 0; v < VECS; v++) p[v] = in_register(load_as<vi>(weights + (pair * VECS + v) * W));
        for (int i = 0; i < DIMS; i++)
            for (int v = 0; v < VECS; v++) acc[i][v] = add_products(acc[i][v], values[d + i], p[v]);
    }
    for (int i = 0; i < DIMS; i++)
        for (int v = 0; v < VECS; v++) store(mixed + ((d + i) * VECS + v) * W, acc[i][v]);
}

// Turns the scores of up to DOT_PART tokens in one vector of lanes, `stride` floats from token to token, into weights, or
// into [pair] pairs of them. The scores up to a multiple of W are there. Returns their sum, added up in the order of
// attend_dots: by t % W first.
template <bool PAIRS> inline vf weigh(float* scores, int64_t stride, int count, vf most) {
    vf totals[W] = {};
    float* to = scores;
    for (int at = 0; at < count; at += W)
#pragma GCC unroll 8
        for (int t = 0; t < W; t += 2, scores += 2 * stride) {
            const vf first = load(scores) - most, second = load(scores + stride) - most;
            const vf weights[] = {PAIRS ? exp2_roughly(first) : exp2v(first), PAIRS ? exp2_roughly(second) : exp2v(second)};
            totals[t] += weights[0];
            totals[t + 1] += weights[1];
            if (PAIRS) {
                store((int32_t*)to, pairs_of(weights[0], weights[1]));
                to += stride;
            } else {
                store(scores, weights[0]);
                store(scores + stride, weights[1]);
            }
        }
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) totals[i] += totals[i + half];
    return totals[0];
}

// The largest of `count` scores.
inline vf largest_score(const float* scores, int64_t stride, int count) {
    vf most = load(scores), others = load(scores + (count - 1) * stride);  // two, as each waits for itself
    for (int t = 1; t + 1 < count; t += 2) {
        most = larger(most, load(scores + t * stride));
        others = larger(others, load(scores + (t + 1) * stride));
    }
    return larger(most, others);
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

// Up to LANES query rows, transposed, and what they have attended to. Padding rows have the position of the last real one.
struct RowBlock {
    const float* query;                   // [D][LANES]; as pairs, [D / 2][LANES]
    const int32_t* positions;             // [LANES]
    const float* slopes;                  // [LANES], as AttentionCall::slope_log2; null: none
    float *mixed, *most, *sums;           // [D][LANES], [LANES], [LANES]: of the parts so far
    float *part, *part_most, *part_sums;  // the same of one part,
    float* scores;                        // and its scores, later its weights: [DOT_PART][LANES]

    int first_position() const { return positions[0]; }
    int last_position() const { return positions[LANES - 1]; }

    // How many of the tokens begin .. end some row sees: the first so many, or none.
    int seen(const AttentionCall& call, int begin, int end) const {
        if (call.window && end <= call.first_seen(first_position())) return 0;
        return std::max(0, std::min(end, last_position() + 1) - begin);
    }

    // What becomes of the scores of `count` tokens from `begin` on before they are compared.
    void finish(const AttentionCall& call, int begin, int count, float* some) const {
        if (call.cap_log2) bend(some, count * LANES, call.cap_log2);
        for (int v = 0; v < LANES && slopes; v += W)
            lean(some + v, count, LANES, load(slopes + v), begin - load_as<vi>(positions + v), 1);
        const bool future = begin + count - 1 > first_position();
        if (!future && !(call.window && begin < call.first_seen(last_position()))) return;
        for (int v = 0; v < LANES; v += W) {
            const vi position = load_as<vi>(positions + v), first = call.window ? call.first_seen(position) : vi{};
            for (int t = 0; t < count; t++) {
                float* score = some + t * LANES + v;
                const vi hidden = (position < begin + t) | (first > begin + t);
                store(score, hidden ? splat(NEVER) : load(score));
            }
        }
    }

    // Adds the part to those before it.
    void fold(int D) const {
        Fold folds[LANE_VECS];
        for (int v = 0; v < LANE_VECS; v++) {
            folds[v] = Fold(load(most + v * W), load(part_most + v * W));
            store(most + v * W, folds[v].most);
            store(sums + v * W, folds[v](load(sums + v * W), load(part_sums + v * W)));
        }
        for (int64_t d = 0; d < D; d++)
            for (int v = 0; v < LANE_VECS; v++) {
                float* at = mixed + d * LANES + v * W;
                store(at, folds[v](load(at), load(part + d * LANES + v * W)));
            }
    }
};

// An item's rows over its context: part by part, and tile by tile of a part, so that all row blocks use what is in cache.
template <class T> class LanePass {
public:
    LanePass(const AttentionCall& call, const CacheLayer& cache, const Item& item, Scratch& scratch)
        : call_(call), cache_(cache), item_(item), D_(call.head_dim), in_pairs_(works_in_pairs<T>(D_)),
          area_((item.count + LANES - 1) / LANES * LANES) {
        scratch.start(area_ * (3 * D_ + DOT_PART + 6) + LANE_TILE * D_ + 256);
        queries_ = scratch.take(area_ * D_), mixed_ = scratch.take(area_ * D_), part_ = scratch.take(area_ * D_);
        scores_ = scratch.take(area_ * DOT_PART), wide_ = scratch.take(LANE_TILE * D_);
        most_ = scratch.take(area_), sums_ = scratch.take(area_);
        part_most_ = scratch.take(area_), part_sums_ = scratch.take(area_);
        positions_ = scratch.take<int32_t>(area_);
        slopes_ = slopes_of(call, item, area_, scratch.take(area_));
    }

    void run(const Results& results) {
        begin_rows(call_, item_, area_, positions_, most_, sums_);
        turn_queries();
        std::memset(mixed_, 0, sizeof(float) * area_ * D_);
        for (int begin = item_.begin, end; begin < item_.end; begin = end) {
            end = std::min((begin / DOT_PART + 1) * DOT_PART, item_.end);
            score(begin, end);
            weigh_scores(begin, end);
            mix(begin, end);
            by_blocks([&](const RowBlock& block) {
                if (block.seen(call_, begin, end)) block.fold(D_);
            });
        }
        float* turned = queries_;  // no longer needed
        for (int64_t first = 0; first < area_; first += LANES)
            turn_back<LANES>(mixed_ + first * D_, int(std::min<int64_t>(LANES, item_.count - first)), D_, turned + first * D_);
        results.put(item_, turned, most_, sums_);
    }

private:
    void turn_queries() {
        const auto query_row = [&](int64_t row) {
            return row < item_.count ? call_.query_row(item_.seq, item_.kv_head, item_.first + int(row)) : nullptr;
        };
        for (int64_t from = 0; from < area_ && in_pairs_; from += W)
            columns_of_queries(query_row, int(from), D_, call_.scale_log2, LANES,
                               (uint32_t*)queries_ + from / LANES * LANES * D_ + from % LANES);
        for (int64_t row = 0; row < area_ && !in_pairs_; row++) {
            float* column = queries_ + row / LANES * LANES * D_ + row % LANES;
            const float* from = query_row(row);
            for (int d = 0; d < D_; d++) column[d * LANES] = from ? from[d] * call_.scale_log2 : 0;
        }
    }

    template <class Body> void by_blocks(const Body& body) const {
        for (int64_t at = 0; at < area_; at += LANES)
            body(RowBlock{queries_ + at * D_, positions_ + at, slopes_ ? slopes_ + at : nullptr, mixed_ + at * D_, most_ + at,
                          sums_ + at, part_ + at * D_, part_most_ + at, part_sums_ + at, scores_ + at * DOT_PART});
    }

    // Calls body(block, token, number of tokens, offset of their scores in tokens) for each tile of K (kv = 0) or V of the
    // tokens begin .. end, and each block that sees some of it.
    template <class Body> void by_tiles(int kv, int begin, int end, const Body& body) {
        for (int at = begin; at < end; at += LANE_TILE) {
            open(kv, at, std::min(LANE_TILE, end - at));
            by_blocks([&](const RowBlock& block) {
                const int count = std::min(LANE_TILE, begin + block.seen(call_, begin, end) - at);
                if (count > 0) body(block, at, count, int64_t(at - begin));
            });
        }
    }

    // Rows of K or V as the inner loops take them, with some more, to be scored and ignored.
    void open(int kv, int at, int count) {
        cache_.rows(call_.table(item_.seq), item_.kv_head, kv, at, count, rows_);
        std::fill(rows_ + count, rows_ + LANE_TILE + LANE_KEYS - 1, rows_[0]);
        if constexpr (std::is_same<T, float>::value) {
            std::copy(rows_, rows_ + LANE_TILE + LANE_KEYS - 1, floats_);
        } else if (!in_pairs_) {
            for (int t = 0; t < count; t++)
                for (int d = 0; d < D_; d += W) store(wide_ + t * D_ + d, load(rows_[t] + d));
            for (int t = 0; t < LANE_TILE + LANE_KEYS - 1; t++) floats_[t] = wide_ + std::min(t, count - 1) * D_;
        } else if constexpr (std::is_same<T, bf16>::value) {
            for (int t = 0; t < count && kv == 1; t += 2) put_pairs(rows_[t], rows_[t + 1], D_, (uint32_t*)wide_ + t / 2 * D_);
        }
    }

    void score(int begin, int end) {
        std::fill(part_most_, part_most_ + area_, NEVER);
        by_tiles(0, begin, end, [&](const RowBlock& block, int at, int count, int64_t offset) {
            float* some = block.scores + offset * LANES;
            for (int t = 0; t < count; t += LANE_KEYS) {
                if constexpr (std::is_same<T, bf16>::value)
                    if (in_pairs_) {
                        score_pairs<LANE_KEYS, LANE_VECS>((const uint32_t*)block.query, rows_ + t, D_, some + t * LANES);
                        continue;
                    }
                score_keys<LANE_KEYS, LANE_VECS>(block.query, floats_ + t, D_, some + t * LANES);
            }
            scale(some, count);
            block.finish(call_, at, count, some);
            for (int v = 0; v < LANES; v += W)
                store(block.part_most + v, larger(load(block.part_most + v), largest_score(some + v, LANES, count)));
        });
    }

    void weigh_scores(int begin, int end) {
        const auto weigh_all = in_pairs_ ? weigh<true> : weigh<false>;
        by_blocks([&](const RowBlock& block) {
            const int count = block.seen(call_, begin, end);
            std::fill(block.scores + count * LANES, block.scores + (count + W - 1) / W * W * LANES, NEVER);
            for (int v = 0; v < LANES; v += W)
                store(block.part_sums + v, weigh_all(block.scores + v, LANES, count, load(block.part_most + v)));
        });
    }

    void mix(int begin, int end) {
        std::memset(part_, 0, sizeof(float) * area_ * D_);
        by_tiles(1, begin, end, [&](const RowBlock& block, int, int count, int64_t offset) {
            if (in_pairs_) {
                const float* weights = block.scores + offset / 2 * LANES;
                for (int d = 0; d < D_; d += LANE_KEYS)
                    mix_dims_in_pairs<LANE_KEYS, LANE_VECS>(weights, (const uint32_t*)wide_, (count + 1) / 2, d, D_, block.part);
                return;
            }
            float* weights = block.scores + offset * LANES;
            scale(weights, count);
            for (int d = 0; d < D_; d += LANE_KEYS) mix_dims<LANE_KEYS, LANE_VECS>(weights, floats_, count, d, block.part);
        });
    }

    // Scales scores, or weights, of the open tile by the scales of its coded rows.
    void scale(float* some, int count) const {
        for (int t = 0; t < count && IS_CODED<T>; t++)
            for (int v = 0; v < LANES; v += W) store(some + t * LANES + v, load(some + t * LANES + v) * row_scale(rows_[t], D_));
    }

    const AttentionCall& call_;
    const CacheLayer& cache_;
    const Item& item_;
    const int D_;
    const bool in_pairs_;
    const int64_t area_;  // rows, with padding
    float *queries_, *mixed_, *part_, *scores_, *most_, *sums_, *part_most_, *part_sums_;
    float* wide_;         // the open tile: [token][D], or values as [pair][D]
    int32_t* positions_;
    const float* slopes_;
    const T* rows_[LANE_TILE + LANE_KEYS - 1];
    const float* floats_[LANE_TILE + LANE_KEYS - 1];
};

template <class T>
void attend_lanes(const AttentionCall& call, const CacheLayer& cache, const Item& item, const Results& results, Scratch& scratch) {
    LanePass<T>(call, cache, item, scratch).run(results);
}

}  // namespace mooncake
