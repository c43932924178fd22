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
constexpr int64_t TOGETHER = 8;            // runs summed side by side
constexpr int64_t PIECE = 2048;            // tokens that stay in the L1 cache until they are read again
constexpr int BUCKETS = 4096;
constexpr float BUCKETS_A_UNIT = 128;
constexpr uint32_t DIGITS = 2048;          // top-p looks at 11 bits of the logits at a time

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
        logits_ = logits;
        size_ = size;
        best_ = most();
        if (!std::isfinite(best_)) return -1;
        if (draw.temperature == 0) return first_of(best_);
        temperature_ = draw.temperature;
        double threshold = draw.min_p > 0 ? double(best_) + temperature_ * std::log(draw.min_p) : MINUS_INFINITY;
        if (draw.top_k > 0 && draw.top_k < size) threshold = std::max(threshold, double(ranked(draw.top_k)));
        if (draw.top_p < 1) threshold = std::max(threshold, double(top_p_threshold(threshold, draw.top_p)));
        keep(float(threshold));
        return drawn(uniform_of(draw.seed, position));
    }

    // The log-probability of `token`, NaN if the logits are not finite; and the `count` most likely tokens with theirs,
    // most likely first, ties in order of ids.
    double score(const float* logits, int64_t size, int64_t token, int64_t count, int64_t* ids, double* logprobs) {
        logits_ = logits;
        size_ = size;
        best_ = most();
        if (!std::isfinite(best_)) return std::numeric_limits<double>::quiet_NaN();
        const double total = best_ + std::log(sum_of_weights());
        if (count) most_likely(count, ids);
        for (int64_t rank = 0; rank < count; rank++) logprobs[rank] = logits[ids[rank]] - total;
        return logits[token] - total;
    }

private:
    // The largest logit, NaN if there is one. Remembers the piece where it first occurs, so the row is read from memory
    // only once.
    float most() {
        float best = -std::numeric_limits<float>::infinity();
        bool is_strange = false;
        piece_ = 0;
        for (int64_t from = 0; from < size_; from += PIECE) {
            const int64_t end = std::min(size_, from + PIECE);
            vf top = splat(-std::numeric_limits<float>::infinity());
            vi strange{};
            int64_t i = from;
            for (; i + W <= end; i += W) {
                __builtin_prefetch(logits_ + i + PIECE);  // the hardware prefetcher stops at every 4 KiB
                const vf x = load(logits_ + i);
                top = larger(top, x);
                strange |= x != x;
            }
            float best_here = largest(top);
            for (int lane = 0; lane < W; lane++) is_strange |= strange[lane] != 0;
            for (; i < end; i++) {
                best_here = std::max(best_here, logits_[i]);
                is_strange |= logits_[i] != logits_[i];
            }
            if (best_here > best) {
                best = best_here;
                piece_ = from;
            }
        }
        return is_strange ? std::numeric_limits<float>::quiet_NaN() : best;
    }

    // Only after most(), which has found the piece.
    int64_t first_of(float wanted) const {
        for (int64_t i = piece_; i < size_; i++)
            if (logits_[i] == wanted) return i;
        return 0;
    }

    // With temperature 1.
    double sum_of_weights() const {
        vd sums{};
        const auto weights = [&](vf8 piece) { return exp_of(__builtin_convertvector(piece, vd) - double(best_)); };
        int64_t i = 0;
        for (; i + DW <= size_; i += DW) sums += weights(load_as<vf8>(logits_ + i));
        vf8 rest = vf8{} - std::numeric_limits<float>::infinity();
        std::memcpy(&rest, logits_ + i, (size_ - i) * sizeof(float));
        sums += weights(rest);
        double sum = 0;
        for (int lane = 0; lane < DW; lane++) sum += sums[lane];
        return sum;
    }

    // The tokens of the `count` largest logits; of equal ones, the first. Most groups of tokens contain none of them.
    void most_likely(int64_t count, int64_t* ids) {
        constexpr int64_t GROUP = 4 * W;
        values_.clear();
        for (int64_t from = 0; from < size_; from += GROUP) {
            const int64_t end = std::min(size_, from + GROUP);
            if (int64_t(values_.size()) == count && end == from + GROUP) {
                vf top = load(logits_ + from);
                for (int64_t i = from + W; i < end; i += W) top = larger(top, load(logits_ + i));
                if (!(largest(top) > values_.back())) continue;
            }
            for (int64_t i = from; i < end; i++) {
                const float x = logits_[i];
                const int64_t held = values_.size();
                if (held == count && !(x > values_.back())) continue;
                const int64_t rank = std::upper_bound(values_.begin(), values_.end(), x, std::greater<float>()) - values_.begin();
                if (held < count) values_.push_back(x);
                std::copy_backward(values_.begin() + rank, values_.end() - 1, values_.end());
                std::copy_backward(ids + rank, ids + values_.size() - 1, ids + values_.size());
                values_[rank] = x;
                ids[rank] = i;
            }
        }
    }

    int bucket_of(float x) const { return int(std::min((best_ - x) * BUCKETS_A_UNIT, float(BUCKETS - 1))); }

    // The logit of rank `count`; rank 1 is the largest.
    float ranked(int64_t count) {
        counts_.assign(BUCKETS, 0);
        for (int64_t i = 0; i < size_; i++) counts_[bucket_of(logits_[i])]++;
        int last = 0;
        for (int64_t seen = counts_[0]; seen < count && last < BUCKETS - 1;) seen += counts_[++last];
        values_.clear();
        for (int64_t i = 0; i < size_; i++)
            if (bucket_of(logits_[i]) <= last) values_.push_back(logits_[i]);
        std::nth_element(values_.begin(), values_.begin() + (count - 1), values_.end(), std::greater<float>());
        return values_[count - 1];
    }

    // 11 of the logit's bits, mapped so that they order like the numbers.
    static uint32_t digit_of(float x, int shift) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        bits ^= bits >> 31 ? ~uint32_t(0) : uint32_t(1) << 31;
        return bits >> shift & (DIGITS - 1);
    }

    // The last logit in the smallest set whose share of all weight at or above `threshold` reaches `top_p`. It is found
    // digit by digit of the logits' bits: the digit in which the share is reached, then the same among logits with that
    // digit. So nothing is sorted.
    float top_p_threshold(double threshold, double top_p) {
        keep(float(threshold));
        double left = 0;
        for (double weight : weights_) left += weight;
        left *= top_p;
        for (int shift : {21, 10, 0}) {
            digit_weights_.assign(DIGITS, 0);
            for (size_t i = 0; i < values_.size(); i++) digit_weights_[digit_of(values_[i], shift)] += weights_[i];
            uint32_t found = DIGITS;
            for (uint32_t digit = DIGITS; digit-- > 0;) {
                if (digit_weights_[digit] == 0) continue;
                if (found < DIGITS) left -= digit_weights_[found];
                found = digit;
                if (digit_weights_[digit] >= left) break;
            }
            size_t count = 0;
            for (size_t i = 0; i < values_.size(); i++) {
                if (digit_of(values_[i], shift) != found) continue;
                values_[count] = values_[i];
                weights_[count++] = weights_[i];
            }
            values_.resize(count);
            weights_.resize(count);
        }
        return values_.front();
    }

    // Fills ids_ and weights_ with the tokens at or above `threshold`, in order of their ids; without a threshold ids_
    // stays empty.
    void keep(float threshold) {
        ids_.clear();
        if (threshold == -std::numeric_limits<float>::infinity()) {
            values_.assign(logits_, logits_ + size_);
        } else {
            values_.clear();
            for (int64_t i = 0; i < size_; i++) {
                if (!(logits_[i] >= threshold)) continue;
                ids_.push_back(i);
                values_.push_back(logits_[i]);
            }
        }
        weigh(values_.data(), int64_t(values_.size()));
    }

    void weigh(const float* values, int64_t size) {
        weights_.resize(size + DW);
        const auto put = [&](int64_t i, vf8 piece) {
            const vd weight = exp_of((__builtin_convertvector(piece, vd) - double(best_)) / temperature_);
            std::memcpy(weights_.data() + i, &weight, sizeof weight);
        };
        int64_t i = 0;
        for (; i + DW <= size; i += DW) put(i, load_as<vf8>(values + i));
        vf8 rest{};
        std::memcpy(&rest, values + i, (size - i) * sizeof(float));
        put(i, rest);
        weights_.resize(size);
    }

    // The token at which the cumulative weight passes the draw, in two levels: first the run of tokens, then the token.
    int64_t drawn(double uniform) {
        const int64_t size = int64_t(weights_.size()), runs = (size + RUN - 1) / RUN;
        run_weights_.assign(runs, 0);
        int64_t run = 0;
        for (; (run + TOGETHER) * RUN <= size; run += TOGETHER) {  // each run is summed in order; none waits for another
            double sums[TOGETHER] = {};
            for (int64_t i = 0; i < RUN; i++)
                for (int64_t j = 0; j < TOGETHER; j++) sums[j] += weights_[(run + j) * RUN + i];
            std::copy(sums, sums + TOGETHER, run_weights_.data() + run);
        }
        for (; run < runs; run++)
            for (int64_t i = run * RUN; i < std::min(size, (run + 1) * RUN); i++) run_weights_[run] += weights_[i];
        double total = 0;
        for (double weight : run_weights_) total += weight;
        double left = uniform * total;
        const int64_t first = passes(run_weights_.data(), runs, left) * RUN;
        const int64_t place = first + passes(weights_.data() + first, std::min(RUN, size - first), left);
        return ids_.empty() ? place : ids_[place];
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
    int64_t size_ = 0, piece_ = 0;
    float best_ = 0;
    double temperature_ = 1;
    std::vector<int32_t> counts_;
    std::vector<int64_t> ids_;
    std::vector<float> values_;
    std::vector<double> weights_, run_weights_, digit_weights_;
};

template <class Row>
void sample(const Row& row, int64_t count, int64_t vocab, const Draw* draws, const int64_t* positions, int64_t* tokens,
            int threads) {
    parallel(count, threads, [&](int64_t i) {
        static thread_local RowSampler sampler;
        tokens[i] = draws ? sampler.sample(row(i), vocab, draws[i], positions[i]) : sampler.sample(row(i), vocab, Draw{}, 0);
    });
}

// Row rows[i] of `logits` is scored for tokens[i] and its counts[i] most likely tokens; the outputs have room for
// `most` per row.
inline void score(const float* logits, int64_t stride, int64_t count, int64_t vocab, const int64_t* rows, const int64_t* tokens,
                  const int64_t* counts, int64_t most, double* logprobs, int64_t* top_ids, double* top_logprobs, int threads) {
    parallel(count, threads, [&](int64_t i) {
        static thread_local RowSampler sampler;
        logprobs[i] = sampler.score(logits + rows[i] * stride, vocab, tokens[i], counts[i], top_ids + i * most,
                                    top_logprobs + i * most);
    });
}

}  // namespace mooncake
