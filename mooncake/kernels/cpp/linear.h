// Products of a few to some thousand rows of activations with packed weights.
//
// Every output is one sum over inputs in order, whichever rows are computed together and on however many threads, so a
// token's result is bit-identical in every batch. Libraries do not guarantee that, and it is what makes chunks, batches
// and reused prefixes agree.
#pragma once

#include "activations.h"
#include "forecast.h"

namespace mooncake {

constexpr int START = 3072;                   // bytes to prefetch before a product begins, per thread
constexpr int PANEL_RUN = 4;                  // panels taken at once, so that each thread reads long runs
constexpr int64_t NEAR_STRIPS = 8;            // strips of tiles that use a panel together; if they are short,
constexpr int64_t NEAR_BYTES = 800 << 10;     // as many as this, which the L2 cache keeps
constexpr int BESIDE_ROWS = 2;                // of so few, the sums of one panel wait for each other
constexpr int PRODUCTS_ALONE = 1 << 15;       // weights times rows below which threads do not pay off

// What is done with the results.
enum class Then {
    STORE,  // to[row][output] = result
    ADD,    // to[row][output] += result
    GATE,   // to[row][i] = silu(gate i) * up i, for gated weights
};

struct Target {
    Then then;
    float* to;
    int64_t stride;
    const Activations* next = nullptr;  // GATE: results go here instead, as the next product takes them
    Forecast* forecast = nullptr;       // to be brought meanwhile
};

// Prefetches what each thread reads first, while activations are prepared.
inline void prefetch_start(const PackedLinear& layer, int threads) {
    for (int t = 0; t < threads; t++) {
        const char* at = layer.panel(layer.num_panels() * t / threads);
        for (int i = 0; i < START; i += 64) __builtin_prefetch(at + i, 0, SECOND_CACHE);
    }
}

// Splits a product into items, which any thread may take: runs of panels, each for part of the rows.
struct Cuts {
    int64_t panels, strips, cuts, run, runs;
    bool is_tiled, is_small, are_beside;

    Cuts(const PackedLinear& layer, const Activations& x, int team) : panels(layer.num_panels()), strips(x.strips.count) {
        is_tiled = x.unit == ROW_UNIT;
        is_small = is_tiled && x.strips.rows * x.planes <= TILE_ROWS;
        // few panels and many rows: split rows too, or some threads would be idle at the end
        cuts = std::min(strips, std::max<int64_t>(1, (4 * team + panels - 1) / panels));
        // tiles finish a panel so fast that rows must be in cache, too: each part of them goes through all panels in
        // turn
        const int64_t near = std::max(NEAR_STRIPS, NEAR_BYTES / (TILE_STRIP * x.row_bytes));
        if (is_tiled) cuts = std::max(cuts, (strips + near - 1) / near);
        // with vectors of 8 floats a panel has half as many sums, and one stream per thread gets less of the memory's speed
        // than several (both seen on Zen 3); two rows of codes have enough sums
        are_beside = W < 16 && !layer.code_bits && x.strips.rows <= (x.unit ? 1 : BESIDE_ROWS);
        run = panels >= 8 * PANEL_RUN * team ? PANEL_RUN : is_small ? 2 : 1;
        if (are_beside) run = evenly(panels, team, PANEL_RUN / x.strips.rows);
        runs = (panels + run - 1) / run;
    }
    int64_t items() const { return runs * cuts; }

private:
    // The longest runs with which the last of `team` threads ends soonest.
    static int64_t evenly(int64_t panels, int team, int64_t most) {
        int64_t best = 1, least = INT64_MAX;
        for (int64_t run = most; run > 0; run--) {
            const int64_t runs = (panels + run - 1) / run, longest = (runs + team - 1) / team * run;
            if (longest < least) best = run, least = longest;
        }
        return best;
    }
};

// Computes an item of a product; see linear.cpp.
void product_item(const PackedLinear& layer, const Activations& x, const Target& target, const Cuts& how, int64_t item);

inline void multiply_by(const PackedLinear& layer, const Activations& x, const Target& target, int threads) {
    const int team = x.strips.rows * layer.inputs * layer.outputs < PRODUCTS_ALONE ? 1 : threads;
    const Cuts how(layer, x, team);
    parallel(how.items(), team, [&](int64_t item) { product_item(layer, x, target, how, item); });
}

}  // namespace mooncake
