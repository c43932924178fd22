// Low-rank adapters (LoRA): B (A x) added to a layer's product, for rows whose sequence has an adapter.
//
// Tokens are ordered by sequence, so a batch's rows form runs of one adapter each. A row's result depends on no other
// row.
#pragma once

#include <vector>

#include "linear.h"

namespace mooncake {

// Both are null if the adapter does not change this product. Mirrored in cpu_decoder.py, as is LayerAdapter.
struct LowRank {
    const PackedLinear *down, *up;  // A [rank][inputs]; B [outputs][rank], scaled
};

struct LayerAdapter {
    LowRank qkv, output, gate_up, down;
};

struct AdaptedRun {
    int64_t first, rows;
    const LayerAdapter* layers;
};

// The rows i in [0, rows) that have an adapter, as runs; `place(i)` is its index, -1 for none. False if an index is out
// of range, or nothing is there.
template <class Place>
bool find_runs(int64_t rows, const LayerAdapter* const* adapters, int64_t num_adapters, Place place,
               std::vector<AdaptedRun>& runs) {
    runs.clear();
    int32_t last = -1;
    for (int64_t i = 0; i < rows; i++) {
        const int32_t at = place(i);
        if (at < -1 || at >= num_adapters || (at >= 0 && !adapters[at])) return false;
        if (at >= 0 && at == last)
            runs.back().rows++;
        else if (at >= 0)
            runs.push_back({i, 1, adapters[at]});
        last = at;
    }
    return true;
}

// to += B (A x), with x = `from`, normalised if `norm` is not null.
inline void add_low_rank(const LowRank& pair, const float* from, int64_t rows, const float* norm, float eps, float* to,
                         int64_t to_stride, int threads) {
    static thread_local Scratch turned, narrow;
    float* inner = narrow.start(rows * pair.down->outputs);
    const Activations x = prepare(*pair.down, from, pair.down->inputs, rows, norm, eps, turned, threads);
    multiply_by(*pair.down, x, {Then::STORE, inner, pair.down->outputs}, threads);
    const Activations y = prepare(*pair.up, inner, pair.up->inputs, rows, nullptr, eps, turned, threads);
    multiply_by(*pair.up, y, {Then::ADD, to, to_stride}, threads);
}

// SwiGLU of results stored as panels of gates and ups: what Then::GATE does inside a product.
inline void gate_panels(const float* wide, int64_t rows, int64_t width, float* out, int threads) {
    parallel(rows, rows * width < (1 << 14) ? 1 : threads, [&](int64_t r) {
        const float* from = wide + 2 * r * width;
        for (int64_t i = 0; i < width; i += W, from += PANEL) store(out + r * width + i, silu(load(from)) * load(from + W));
    });
}

}  // namespace mooncake
