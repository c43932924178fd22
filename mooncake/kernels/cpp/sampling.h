// The next token for each row of logits: what mooncake/engine/decoding/sampler.py defines in numpy, without sorting the
// vocabulary. Weights are float64 and tokens are in order of their ids, so a draw gives the same token in both.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "vectors.h"

namespace mooncake {

constexpr int DW = 8;  // doubles in a vector, on any machine
using vd = double __attribute__((vector_size(DW * 8)));
using vl = int64_t __attribute__((vector_size(DW * 8)));
using vf8 = float __attribute__((vector_size(DW * 4)));

constexpr double MINUS_INFINITY = -std::numeric_limits<double>::infinity();
constexpr int64_t RUN = 256;               // tokens; a draw first looks at the sums of runs
constexpr int64_t LANE = 64;               // tokens in a lane of a piece, of which the largest logit is remembered
constexpr int64_t PIECE = LANE * W;        // tokens that stay in the L1 cache until they are read again
constexpr int64_t GROUP = 4 * W;           // tokens looked at together: most groups have none of the likely ones

// e^x for x ≤ 0, exact to about the last bit; 0 where the result is not a normal number.
inline vd exp_of(vd x) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52
    const vd inside = x < -708.0 ? vd{} - 708.0 : x;
    const vd shifted = inside * 1.4426950408889634 + magic, n = shifted - magic;
    const vd r = (inside - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    constexpr double inverse_factorials[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                             1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                                             1.0 / 6,          0.5,             1.0,            1.0};
    vd p{};
    for (double coefficient : inverse_factorials) p = p * r + coefficient;
    const vl exponent = ((vl)shifted << 52) + (int64_t(1023) << 52);
    const vd value = p * (vd)exponent;
    return x < -708.0 ? vd{} : value;
}

struct Draw {
    double temperature, top_p, min_p;  // temperature 0: the most likely token
    int64_t top_k;                     // 0: all
    uint64_t seed;
};

inline uint64_t mix_bits(uint64_t bits) {
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
    return bits ^ bits >> 31;
}

// As `uniforms` of mooncake/engine/decoding/randomness.py.
inline double uniform_of(uint64_t seed, uint64_t position) {
    const uint64_t bits = mix_bits(mix_bits(seed) + (position + 1) * 0x9E3779B97F4A7C15);
    return double(bits >> 11) * (1.0 / (uint64_t(1) << 53));
}

class RowSampler {
public:
    // The token at `position`, or -1 if the logits are not finite.
    int64_t sample(const float* logits, int64_t size, const Draw& draw, int64_t position) {
        look_at(logits, size);
        if (!std::isfinite(best_)) return -1;
        if (draw.temperature == 0) return first_of(best_);
        temperature_ = draw.temperature;
        const double uniform = uniform_of(draw.seed, position);
        double threshold = draw.min_p > 0 ? double(best_) + temperature_ * std::log(draw.min_p) : MINUS_INFINITY;
        if (draw.top_k > 0 && draw.top_k < size) threshold = std::max(threshold, double(ranked(draw.top_k)));
        if (draw.top_p < 1) threshold = std::max(threshold, double(top_p_threshold(threshold, draw.top_p)));
        if (threshold == MINUS_INFINITY) return drawn(logits, size, uniform);
        keep(float(threshold));
        return ids_[drawn(values_.data(), kept_, uniform)];
    }

    // The log-probability of `token`, NaN if the logits are not finite; and the `count` most likely tokens with theirs,
    // most likely first, ties in order of ids.
    double score(const float* logits, int64_t size, int64_t token, int64_t count, int64_t* ids, double* logprobs) {
        look_at(logits, size);
        if (!std::isfinite(best_)) return std::numeric_limits<double>::quiet_NaN();
        temperature_ = 1;
        const double total = best_ + std::log(sum_of_weights(logits, size));
        if (count) most_likely(count, ids);
        for (int64_t rank = 0; rank < count; rank++) logprobs[rank] = logits[ids[rank]] - total;
        return logits[token] - total;
    }

private:
    // Finds the largest logit, NaN if there is one; the piece where it first occurs; and the largest of each lane of each
    // piece. So the row is read from memory only once.
    void look_at(const float* logits, int64_t size) {
        logits_ = logits;
        size_ = size;
        best_ = -std::numeric_limits<float>::infinity();
        piece_ = 0;
        tops_.clear();
        bool is_strange = false;
        for (int64_t from = 0; from < size; from += PIECE) {
            const int64_t end = std::min(size, from + PIECE);
            vf top = splat(-std::numeric_limits<float>::infinity());
            vi strange{};
            for (int64_t i = from; i < end; i += W) {
                __builtin_prefetch(logits + i + 2048);  // the hardware prefetcher stops at every 4 KiB
                const vf x = i + W <= end ? load(logits + i) : last_of(i);
                top = larger(top, x);
                strange |= x != x;
            }
            for (int lane = 0; lane < W; lane++) is_strange |= strange[lane] != 0;
            tops_.insert(tops_.end(), &top[0], &top[0] + W);
            if (const float best_here = largest(top); best_here > best_) {
                best_ = best_here;
                piece_ = from;
            }
        }
        if (is_strange) best_ = std::numeric_limits<float>::quiet_NaN();
    }

    // Logits `from` to the end, fewer than a vector, and nothing likely behind them.
    vf last_of(int64_t from) const {
        vf x = splat(-std::numeric_limits<float>::infinity());
        std::memcpy(&x, logits_ + from, (size_ - from) * sizeof(float));
        return x;
    }

    int64_t first_of(float wanted) const {
        for (int64_t i = piece_; i < size_; i++)
            if (logits_[i] == wanted) return i;
        return 0;
    }

    // The logit of rank `count`; rank 1 is the largest. That many lanes have a logit that is not below it; so what is below
    // all of these need not be looked at.
    float ranked(int64_t count) {
        float least = -std::numeric_limits<float>::infinity();
        if (count <= int64_t(tops_.size())) least = of_rank(count, tops_.data(), tops_.size());
        keep(least);
        return of_rank(count, values_.data(), kept_);
    }

    static float of_rank(int64_t count, float* values, int64_t size) {
        std::nth_element(values, values + (count - 1), values + size, std::greater<float>());
        return values[count - 1];
    }

    // The tokens of the `count` largest logits; of equal ones, the first.
    void most_likely(int64_t count, int64_t* ids) {
        keep(ranked(count));
        std::stable_sort(ids_.begin(), ids_.begin() + kept_, [&](int32_t a, int32_t b) { return logits_[a] > logits_[b]; });
        std::copy_n(ids_.begin(), count, ids);
    }

    // Fills ids_ and values_ with the kept_ tokens at or above `threshold`, in order of their ids, and their logits.
    void keep(float threshold) {
        if (int64_t(weights_.size()) < size_ + 5 * DW) {  // the last that grows: there may be no memory for it
            ids_.resize(size_ + W);
            values_.resize(size_ + 4 * DW);
            weights_.resize(size_ + 5 * DW);
        }
        kept_ = 0;
        for (int64_t from = 0; from < size_; from += GROUP) {
            const int64_t end = std::min(size_, from + GROUP);
            if (end == from + GROUP) {
                vf top = load(logits_ + from);
                for (int64_t i = from + W; i < end; i += W) top = larger(top, load(logits_ + i));
                if (!(largest(top) >= threshold)) continue;
            }
            int64_t i = from;
            for (; i + W <= end; i += W)
                kept_ += put_likely(load(logits_ + i), threshold, int32_t(i), values_.data() + kept_, ids_.data() + kept_);
            for (; i < end; i++) {
                ids_[kept_] = int32_t(i);
                values_[kept_] = logits_[i];
                kept_ += logits_[i] >= threshold;
            }
        }
    }

    // The last logit in the smallest set whose share of all weight at or above `threshold` reaches `top_p`. Most tokens are
    // not even looked at: all below `least` together weigh less than what may be left out.
    float top_p_threshold(double threshold, double top_p) {
        const bool is_whole = threshold == MINUS_INFINITY;
        if (!is_whole) keep(float(threshold));
        const float* values = is_whole ? logits_ : values_.data();
        const int64_t size = is_whole ? size_ : kept_;
        const double total = sum_of_weights(values, size);
        const double least = best_ + temperature_ * std::log((1 - top_p) * total / double(2 * size));
        if (least > threshold) keep(std::nextafter(float(least), -std::numeric_limits<float>::infinity()));
        weigh_kept();
        return reached(top_p * total, float(std::max(threshold, least)));
    }

    // The largest logit at or above which there is `wanted` weight among what is kept, or `least` if there is none. It is
    // found by bisection over the numbers that a float can be, in their order: each look at all weights takes few
    // instructions and no branch, where a sort or a selection would take one for each comparison.
    float reached(double wanted, float least) const {
        int64_t low = in_order(least), high = int64_t(in_order(best_)) + 1;
        while (high - low > 1) {
            const int32_t middle = int32_t(low + (high - low) / 2);
            (weight_from(of_order(middle)) >= wanted ? low : high) = middle;
        }
        return of_order(int32_t(low));
    }

    // Integers in the order of the floats that have these bits, but for the sign.
    static int32_t in_order(float x) {
        int32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return bits < 0 ? bits ^ 0x7fffffff : bits;
    }
    static float of_order(int32_t place) {
        const int32_t bits = place < 0 ? place ^ 0x7fffffff : place;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }

    // The weight of what is kept and not below `least`.
    double weight_from(float least) const {
        vd sums[4] = {};
        for (int64_t from = 0; from < kept_; from += 4 * DW)
            for (int64_t j = 0; j < 4; j++) {
                const vf8 logits = load_as<vf8>(values_.data() + from + j * DW);
                const vl weights = load_as<vl>(weights_.data() + from + j * DW);
                sums[j] += (vd)(weights & __builtin_convertvector(logits >= least, vl));
            }
        return sum_of(sums[0] + sums[1] + (sums[2] + sums[3]));
    }

    static double sum_of(vd lanes) {
        double sum = 0;
        for (int lane = 0; lane < DW; lane++) sum += lanes[lane];
        return sum;
    }

    // Fills weights_, with zeros behind the end.
    void weigh_kept() {
        for (int64_t from = 0; from < kept_; from += RUN)
            weigh(values_.data() + from, std::min(RUN, kept_ - from), weights_.data() + from);
        std::fill_n(weights_.data() + kept_, 4 * DW, 0.0);
    }

    // The weights of `count` logits, at most RUN, padded with zeros to whole vectors. Returns their sum.
    double weigh(const float* values, int64_t count, double* weights) const {
        const double inverse = 1 / temperature_;
        vd sums{};
        const auto put = [&](int64_t i, vf8 piece) {
            const vd weight = exp_of((__builtin_convertvector(piece, vd) - double(best_)) * inverse);
            std::memcpy(weights + i, &weight, sizeof weight);
            sums += weight;
        };
        int64_t i = 0;
        for (; i + DW <= count; i += DW) put(i, load_as<vf8>(values + i));
        if (i < count) {
            vf8 rest = vf8{} - std::numeric_limits<float>::infinity();
            std::memcpy(&rest, values + i, (count - i) * sizeof(float));
            put(i, rest);
        }
        return sum_of(sums);
    }

    double sum_of_weights(const float* values, int64_t size) const {
        double weights[RUN], sum = 0;
        for (int64_t from = 0; from < size; from += RUN) sum += weigh(values + from, std::min(RUN, size - from), weights);
        return sum;
    }

    // The index at which the cumulative weight passes the draw, in two levels: first the run of tokens, then the token.
    int64_t drawn(const float* values, int64_t size, double uniform) {
        double weights[RUN], total = 0;
        run_weights_.clear();
        for (int64_t from = 0; from < size; from += RUN) {
            run_weights_.push_back(weigh(values + from, std::min(RUN, size - from), weights));
            total += run_weights_.back();
        }
        double left = uniform * total;
        const int64_t first = passes(run_weights_.data(), run_weights_.size(), left) * RUN, count = std::min(RUN, size - first);
        weigh(values + first, count, weights);
        return first + passes(weights, count, left);
    }

    // The first index at which the cumulative weight exceeds `target`; subtracts what comes before from `target`.
    // Rounding can put the target past the end; then it is the last index with any weight.
    static int64_t passes(const double* weights, int64_t size, double& target) {
        double before = 0, before_last = 0;
        int64_t last = 0;
        for (int64_t i = 0; i < size; i++) {
            if (before + weights[i] > target) {
                target -= before;
                return i;
            }
            if (weights[i] > 0) {
                last = i;
                before_last = before;
            }
            before += weights[i];
        }
        target -= before_last;
        return last;
    }

    const float* logits_ = nullptr;
    int64_t size_ = 0, piece_ = 0, kept_ = 0;
    float best_ = 0;
    double temperature_ = 1;
    std::vector<float> tops_, values_;
    std::vector<int32_t> ids_;
    std::vector<double> weights_, run_weights_;
};

inline void sample(const float* const* rows, int64_t count, int64_t vocab, const Draw* draws, const int64_t* positions,
                   int64_t* tokens, int threads) {
    parallel(count, threads, [&](int64_t i) {
        static thread_local RowSampler sampler;
        tokens[i] = draws ? sampler.sample(rows[i], vocab, draws[i], positions[i]) : sampler.sample(rows[i], vocab, Draw{}, 0);
    });
}

// How many tokens are more likely, or as likely with a lower id, and the token itself.
inline int64_t rank_of(const float* logits, int64_t size, int64_t token) {
    const float own = logits[token];
    int64_t rank = 1;
    for (int64_t i = 0; i < token; i++) rank += logits[i] >= own;
    for (int64_t i = token + 1; i < size; i++) rank += logits[i] > own;
    return rank;
}

// Row rows[i] of `logits` is scored for tokens[i] and its counts[i] most likely tokens; the outputs have room for
// `most` per row.
inline void score(const float* logits, int64_t stride, int64_t count, int64_t vocab, const int64_t* rows, const int64_t* tokens,
                  const int64_t* counts, int64_t most, double* logprobs, int64_t* ranks, int64_t* top_ids, double* top_logprobs,
                  int threads) {
    parallel(count, threads, [&](int64_t i) {
        static thread_local RowSampler sampler;
        logprobs[i] = sampler.score(logits + rows[i] * stride, vocab, tokens[i], counts[i], top_ids + i * most,
                                    top_logprobs + i * most);
        ranks[i] = std::isnan(logprobs[i]) ? 0 : rank_of(logits + rows[i] * stride, vocab, tokens[i]);
    });
}

}  // namespace mooncake
