// A mixture of experts in one call: every expert is computed once, for the rows of the tokens that chose it.
//
// Threads take work of all experts together, so they are busy even with few rows per expert. A token's sum is added in
// the order of its experts' numbers, whatever the batch.
#pragma once

#include <numeric>
#include <vector>

#include "linear.h"

namespace mooncake {

// What gates go through: gelu is by tanh (Gemma 4). RELU_SQUARED: without gates, that is what ups go through (Nemotron-H).
enum ExpertGate : int32_t { SILU = 0, GELU = 1, RELU_SQUARED = 2 };

// Mirrored in cpu_library.py.
struct Experts {
    const PackedLinear *const *gate_up, *const *down;  // by expert; all have one shape; no gates with RELU_SQUARED
    int64_t first, count;  // numbers of the experts held here; other ranks hold the others
    float alpha, limit;  // of a SwiGLU with bounds (gpt-oss); limit 0: none
    int32_t gate;        // an ExpertGate
};

constexpr int64_t MOST_HELD = 4 << 20;   // numbers held between the products, at least one expert's: a prompt is processed in parts
constexpr int64_t WORK_ALONE = 1 << 14;  // numbers to move below which threads do not pay off

class ExpertPass {
public:
    // `chosen` and `shares` are [tokens][per_token].
    ExpertPass(const Experts& experts, const float* hidden, const int64_t* chosen, const float* shares, int64_t tokens,
               int64_t per_token, float* out, int threads)
        : experts_(experts), hidden_(hidden), shares_(shares), tokens_(tokens), per_token_(per_token), out_(out), threads_(threads),
          width_(experts.gate_up[0]->inputs), inner_(experts.down[0]->inputs),
          wide_(experts.gate_up[0]->outputs) {
        sort(chosen);
    }

    void run() {
        const int64_t most = MOST_HELD / (wide_ + width_);  // rows
        std::fill(out_, out_ + tokens_ * width_, 0.0f);
        for (size_t first = 0, end; first < groups_.size(); first = end) {
            for (end = first + 1; end < groups_.size() && groups_[end].end - groups_[first].begin <= most;) end++;
            compute(first, end);
        }
    }

private:
    struct Group {  // the rows of an expert, in the order of `pairs_`
        const PackedLinear *gate_up, *down;
        int64_t begin, end;
    };

    // Sorts pairs by expert, then by token, and notes where each token's pairs are, again by expert.
    void sort(const int64_t* chosen) {
        const int64_t first = experts_.first, count = experts_.count;
        const auto is_here = [&](int64_t pair) { return chosen[pair] >= first && chosen[pair] < first + count; };
        std::vector<int64_t> next(count + 1);
        for (int64_t pair = 0; pair < tokens_ * per_token_; pair++)
            if (is_here(pair)) next[chosen[pair] - first + 1]++;
        std::partial_sum(next.begin(), next.end(), next.begin());
        for (int64_t e = 0; e < count; e++)
            if (next[e] < next[e + 1]) groups_.push_back({experts_.gate_up[e], experts_.down[e], next[e], next[e + 1]});
        pairs_.resize(next[count]);
        places_.assign(tokens_ * per_token_, -1);
        for (int64_t pair = 0; pair < tokens_ * per_token_; pair++)
            if (is_here(pair)) pairs_[next[chosen[pair] - first]++] = pair;
        std::vector<int64_t> filled(tokens_);
        for (int64_t place = 0; place < int64_t(pairs_.size()); place++) {
            const int64_t token = pairs_[place] / per_token_;
            places_[token * per_token_ + filled[token]++] = place;
        }
    }

    // Computes some of the groups, from inputs to what their tokens get.
    void compute(size_t first, size_t end) {
        static thread_local Scratch results;
        const int64_t begin = groups_[first].begin, rows = groups_[end - 1].end - begin;
        results.start(rows * (wide_ + width_) + 64);
        float *wide = results.take(rows * wide_), *parts = results.take(rows * width_);
        multiply(first, end, &Group::gate_up, wide, [&](int64_t place, float* row) {
            std::memcpy(row, hidden_ + pairs_[place] / per_token_ * width_, width_ * sizeof(float));
        });
        multiply(first, end, &Group::down, parts, [&](int64_t place, float* row) { gate(wide + (place - begin) * wide_, row); });
        parallel(tokens_, rows * width_ < WORK_ALONE ? 1 : threads_, [&](int64_t token) { add(token, begin, begin + rows, parts); });
    }

    // One of the products of each group: its rows are written to `to`, group after group. `put` prepares the row at an
    // index.
    template <class Put> void multiply(size_t first, size_t end, const PackedLinear* Group::*product, float* to, const Put& put) {
        const Work work = arrange(first, end, product);
        const int64_t begin = groups_[first].begin, rows = groups_[end - 1].end - begin;
        const PackedLinear& any = *(groups_[first].*product);
        each(work.strips, rows * any.inputs < WORK_ALONE ? 1 : threads_, [&](size_t i, int64_t strip) {
            fill(*(groups_[first + i].*product), work.x[i], strip, groups_[first + i].begin, put);
        });
        each(work.items, rows * any.inputs * any.outputs < PRODUCTS_ALONE ? 1 : threads_, [&](size_t i, int64_t item) {
            const PackedLinear& layer = *(groups_[first + i].*product);
            const Target target{Then::STORE, to + (groups_[first + i].begin - begin) * layer.outputs, layer.outputs};
            product_item(layer, work.x[i], target, work.cuts[i], item);
        });
    }

    struct Work {  // of some groups
        std::vector<Activations> x;
        std::vector<Cuts> cuts;
        std::vector<int64_t> strips{0}, items{0};  // how many there are before each group
    };

    Work arrange(size_t first, size_t end, const PackedLinear* Group::*product) const {
        static thread_local Scratch memory;
        Work work;
        int64_t bytes = 0;
        for (size_t g = first; g < end; g++) bytes += room_bytes(*(groups_[g].*product), groups_[g].end - groups_[g].begin);
        memory.start<char>(bytes);
        for (size_t g = first; g < end; g++) {
            const PackedLinear& layer = *(groups_[g].*product);
            const Activations& x = work.x.emplace_back(take_room(layer, groups_[g].end - groups_[g].begin, memory));
            const Cuts& cuts = work.cuts.emplace_back(layer, x, threads_);
            work.strips.push_back(work.strips.back() + x.strips.count);
            work.items.push_back(work.items.back() + cuts.items());
        }
        return work;
    }

    // Calls body(i, item) for every item of every i; starts[i + 1] - starts[i] of them belong to i.
    template <class Body> static void each(const std::vector<int64_t>& starts, int threads, const Body& body) {
        parallel(starts.back(), threads, [&](int64_t at) {
            const size_t i = std::upper_bound(starts.begin(), starts.end(), at) - starts.begin() - 1;
            body(i, at - starts[i]);
        });
    }

    template <class Put>
    static void fill(const PackedLinear& layer, const Activations& x, int64_t strip, int64_t begin, const Put& put) {
        static thread_local Scratch gathered;
        const int height = x.strips.height(strip);
        float* rows = gathered.start(height * layer.inputs);
        for (int r = 0; r < height; r++) put(begin + x.strips.first(strip) + r, rows + r * layer.inputs);
        fill_strip(layer, x, strip, rows, layer.inputs, nullptr, 0);
    }

    // SwiGLU, or GeGLU, of gates followed by their ups; or squares of ups above 0.
    void gate(const float* gate_up, float* to) const {
        int64_t i = 0;
        if (experts_.gate == RELU_SQUARED) {
            for (; i < inner_; i++) to[i] = gate_up[i] < 0 ? 0.0f : gate_up[i] * gate_up[i];
            return;
        }
        for (; i + W <= inner_; i += W) store(to + i, gated(load(gate_up + i), load(gate_up + inner_ + i)));
        for (; i < inner_; i++) to[i] = gated(splat(gate_up[i]), splat(gate_up[inner_ + i]))[0];
    }

    vf gated(vf gate, vf up) const {
        if (experts_.gate == GELU) return gelu_tanh(gate) * up;
        if (!experts_.limit) return silu(gate) * up;
        const vf most = splat(experts_.limit), alpha = splat(experts_.alpha);
        gate = gate > most ? most : gate;
        up = up > most ? most : up < -most ? -most : up;
        return silu(alpha * gate) / alpha * (up + 1.0f);
    }

    // Adds to a token the results of its pairs in [begin, end).
    void add(int64_t token, int64_t begin, int64_t end, const float* parts) const {
        float* to = out_ + token * width_;
        for (int64_t k = token * per_token_; k < (token + 1) * per_token_; k++) {
            if (places_[k] < begin || places_[k] >= end) continue;
            const float *from = parts + (places_[k] - begin) * width_, share = shares_[pairs_[places_[k]]];
            int64_t i = 0;
            for (; i + W <= width_; i += W) store(to + i, load(to + i) + load(from + i) * share);
            for (; i < width_; i++) to[i] += from[i] * share;
        }
    }

    const Experts& experts_;
    const float *hidden_, *shares_;
    const int64_t tokens_, per_token_;
    float* out_;
    const int threads_;
    const int64_t width_, inner_, wide_;
    std::vector<Group> groups_;
    std::vector<int64_t> pairs_, places_;
};

}  // namespace mooncake
