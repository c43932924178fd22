// Products of a few to some thousand rows of activations with packed weights, which are float32, bfloat16 or int8.
//
// Weights lie in panels of PANEL outputs: for every G inputs the G weights of the panel's first output, of its second, and so
// on. G is what makes the weights of an input cheapest to get: bfloat16 ones in pairs, a shift or a mask apart; fours of int8
// for the int8 product instruction (VNNI), which takes 32-bit lanes as they are; one by one else. Activations lie in strips of
// up to STRIP rows: [inputs][rows], coded ones [inputs / 4][rows][4]. Memory is read once, in one stream a thread.
//
// Every output is one sum over inputs in order, whichever rows are computed together, with whatever threads: so a token's
// result does not depend on its batch, to the bit. Libraries do not promise that, and it is what makes chunks, batches and
// reused prefixes agree.
#pragma once

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

#include <array>

#include "hadamard.h"
#include "pool.h"
#include "steps.h"
#include "vectors.h"

namespace mooncake {

// How weights are held, and what activations become. CODES: int8 weights with a scale an output, activations float32.
// BOTH_CODES: activations are int8 too, with a scale a row, and sums are int32 (W8A8); see hadamard.h.
enum WeightKind : int32_t { FLOATS = 0, BF16S = 1, CODES = 2, BOTH_CODES = 3 };

template <WeightKind KIND> using Held = std::conditional_t<KIND == FLOATS, float, std::conditional_t<KIND == BF16S, bf16, int8_t>>;
template <WeightKind KIND> constexpr int G = KIND == BF16S ? 2 : KIND == BOTH_CODES ? 4 : 1;

// body(k) for `kind` as a constant.
template <class Body> auto with_kind(int32_t kind, const Body& body) {
    switch (kind) {
        case BF16S: return body(std::integral_constant<WeightKind, BF16S>{});
        case CODES: return body(std::integral_constant<WeightKind, CODES>{});
        case BOTH_CODES: return body(std::integral_constant<WeightKind, BOTH_CODES>{});
        default: return body(std::integral_constant<WeightKind, FLOATS>{});
    }
}

constexpr int PANEL_VECS = 2;
constexpr int PANEL = W * PANEL_VECS;         // outputs whose weights lie interleaved
constexpr int STRIP = W == 16 ? 12 : 6;       // rows multiplied at once: STRIP * PANEL_VECS accumulators
constexpr int DEEP = 192;                     // inputs at a time, so that a panel's part stays in L1 for all strips
constexpr int AHEAD = 6144;                   // bytes to prefetch ahead: the hardware's own stops at every 4 KiB
constexpr int START = 3072;                   // bytes to prefetch before a product begins, a thread
constexpr int PANEL_RUN = 4;                  // panels taken at once, so that each thread reads long runs
constexpr int PRODUCTS_ALONE = 1 << 15;       // weights times rows below which threads do not pay

// One packed weight matrix; mirrored in cpu.py. Everything is padded with zeros: outputs to PANEL, inputs to 4.
struct PackedLinear {
    const void* panels;
    const float* bias;    // [outputs] or null
    const float* scales;  // [outputs], of int8 weights
    const int32_t* sums;  // [outputs]: sums of codes, for BOTH_CODES
    int64_t inputs, outputs;
    int32_t kind;
    int32_t is_gated;     // each panel has W gates and then their W ups: `outputs` counts both
    int32_t hadamard;     // inputs in a block of the transform before coding; 1 for none

    int64_t padded() const { return (inputs + 3) / 4 * 4; }
    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }
    int weight_bytes() const { return kind == FLOATS ? 4 : kind == BF16S ? 2 : 1; }
    int64_t panel_bytes() const { return padded() * PANEL * weight_bytes(); }
    const char* panel(int64_t index) const { return (const char*)panels + index * panel_bytes(); }
};

// ---- packing --------------------------------------------------------------------------------------------------------

// Row of the published matrix that is output `at` of a packed one; gates come first in the published one.
inline int64_t source_row(const PackedLinear& layer, int64_t at) {
    if (!layer.is_gated) return at;
    const int64_t within = at % PANEL;
    return at / PANEL * W + within % W + (within < W ? 0 : layer.outputs / 2);
}

// Where in its panel the weight of input k and the panel's output i is.
template <WeightKind KIND> inline int64_t place(int64_t k, int64_t i) {
    return k / G<KIND> * PANEL * G<KIND> + i * G<KIND> + k % G<KIND>;
}

template <WeightKind KIND> void pack(const PackedLinear& layer, const Held<KIND>* rows, Held<KIND>* panels, int threads) {
    using T = Held<KIND>;
    const int64_t K = layer.inputs, padded = layer.padded();
    parallel(layer.num_panels(), threads, [&](int64_t p) {
        T* panel = panels + p * padded * PANEL;
        std::memset(panel, 0, padded * PANEL * sizeof(T));
        for (int i = 0; i < PANEL && p * PANEL + i < layer.outputs; i++) {
            const T* row = rows + source_row(layer, p * PANEL + i) * K;
            for (int64_t k = 0; k < K; k++) panel[place<KIND>(k, i)] = row[k];
        }
    });
}

// Row `at` of the packed matrix as float32 [inputs].
inline void unpack_row(const PackedLinear& layer, int64_t at, float* out) {
    with_kind(layer.kind, [&](auto kind) {
        const auto* panel = (const Held<kind>*)layer.panel(at / PANEL);
        for (int64_t k = 0; k < layer.inputs; k++) out[k] = to_float(panel[place<kind>(k, at % PANEL)]);
    });
    hadamard(out, layer.inputs, layer.hadamard);  // its own inverse, but for the factor that packing took out
    if (layer.scales)
        for (int64_t k = 0; k < layer.inputs; k++) out[k] *= layer.scales[at];
}

// ---- activations ----------------------------------------------------------------------------------------------------

// Rows cut into strips of nearly equal height.
struct Strips {
    int64_t rows, count;
    explicit Strips(int64_t rows) : rows(rows), count((rows + STRIP - 1) / STRIP) {}
    int64_t first(int64_t strip) const { return strip * rows / count; }
    int height(int64_t strip) const { return int(first(strip + 1) - first(strip)); }
};

// Rows of activations in the form that a kind of weights is multiplied with.
struct Activations {
    Strips strips;
    int64_t padded;      // inputs
    bool is_coded;
    char* memory;        // strip by strip
    float* row_scales;   // [rows], when coded

    int64_t row_bytes() const { return padded * (is_coded ? 1 : 4); }
    char* strip(int64_t index) const { return memory + strips.first(index) * row_bytes(); }
};

// ROWS rows, `stride` apart, as float32 [padded][ROWS].
template <int ROWS> void turn(const float* rows, int64_t stride, int64_t K, int64_t padded, float* out) {
    int64_t k = 0;
    for (; k + W <= K; k += W, out += W * ROWS) {
        float piece[ROWS][W];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) store(piece[r], load(rows + r * stride + k));
        for (int i = 0; i < W; i++)
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) out[i * ROWS + r] = piece[r][i];
    }
    for (; k < padded; k++)
        for (int r = 0; r < ROWS; r++) *out++ = k < K ? rows[r * stride + k] : 0.0f;
}

// One row as codes 1 .. 255 around 128 (the instruction wants one side without sign), a scale = max|x| / 127.
inline float code_row(const float* row, int64_t K, int64_t padded, int rows, uint8_t* out) {
    vf top{};
    int64_t k = 0;
    for (; k + W <= K; k += W) top = larger(top, magnitude(load(row + k)));
    float most = largest(top);
    for (; k < K; k++) most = std::max(most, __builtin_fabsf(row[k]));
    const float scale = most / 127.0f, divisor = scale > 0 ? scale : 1.0f;
    for (k = 0; k < padded; k += W) {
        uint8_t codes[W];
        vf piece{};
        if (k + W <= K)
            piece = load(row + k);
        else
            std::memcpy(&piece, row + k, std::max<int64_t>(0, K - k) * sizeof(float));
        store(codes, __builtin_convertvector(round_whole(piece / divisor), vi) + 128);
#pragma GCC unroll 4
        for (int i = 0; i < W; i += 4)
            if (k + i < padded) std::memcpy(out + (k + i) * rows, codes + i, 4);
    }
    return scale;
}

// ---- the inner loops ------------------------------------------------------------------------------------------------

template <int ROWS> struct Sums {
    vf at[ROWS][PANEL_VECS];

    void start(const float* from, bool fresh) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) at[r][v] = fresh ? vf{} : load(from + r * PANEL + v * W);
    }
    void add(const vf* weights, const float* x) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) at[r][v] += weights[v] * x[r];
    }
    void finish(float* to) const {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) store(to + r * PANEL + v * W, at[r][v]);
    }
};

inline void prefetch_panel(const char* at) {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECS; v++) __builtin_prefetch(at + AHEAD + v * W * 4);
}

// What each thread reads first, while activations are made ready.
inline void prefetch_start(const PackedLinear& layer, int threads) {
    for (int t = 0; t < threads; t++) {
        const char* at = layer.panel(layer.num_panels() * t / threads);
        for (int i = 0; i < START; i += 64) __builtin_prefetch(at + i, 0, 2);
    }
}

template <WeightKind KIND> constexpr int GROUP = 4 / sizeof(Held<KIND>);  // inputs whose weights are PANEL * 4 bytes

// Of such a group, input g as weights of PANEL outputs, exactly.
template <WeightKind KIND> inline void widen(const char* group, int g, vf* out) {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECS; v++) {
        if (KIND == BF16S) {
            const vu pairs = load_as<vu>(group + v * W * 4);
            out[v] = (vf)(g ? pairs & 0xffff0000u : pairs << 16);
        } else {
            out[v] = load((const Held<KIND>*)group + g * PANEL + v * W);
        }
    }
}

// sums[row][PANEL] += strip[k][row] * panel[k][PANEL] over `deep` of k.
template <WeightKind KIND, int ROWS> void multiply(const void* strip, const char* panel, int deep, void* sums, bool fresh) {
    const float* x = (const float*)strip;
    Sums<ROWS> acc;
    acc.start((const float*)sums, fresh);
    for (int k = 0; k < deep; k += GROUP<KIND>, panel += PANEL * 4) {
        prefetch_panel(panel);
#pragma GCC unroll 4
        for (int g = 0; g < GROUP<KIND>; g++, x += ROWS) {
            vf weights[PANEL_VECS];
            widen<KIND>(panel, g, weights);
            acc.add(weights, x);
        }
    }
    acc.finish((float*)sums);
}

// The weights of `deep` inputs as float32 [deep][PANEL]: for those who use them more than once.
template <WeightKind KIND> void widen_part(const char* panel, int deep, float* out) {
    for (int k = 0; k < deep; k += GROUP<KIND>, panel += PANEL * 4) {
        prefetch_panel(panel);
        for (int g = 0; g < GROUP<KIND>; g++, out += PANEL) {
            vf weights[PANEL_VECS];
            widen<KIND>(panel, g, weights);
            for (int v = 0; v < PANEL_VECS; v++) store(out + v * W, weights[v]);
        }
    }
}

// sum + the products of 4 unsigned codes with 4 signed ones, lane by lane.
inline vi add_products(vi sum, uint32_t codes, vi weights) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(int(codes)), (__m512i)weights);
#else
    for (int g = 0; g < 4; g++) sum += (weights << (24 - 8 * g) >> 24) * int(codes >> (8 * g) & 255);
    return sum;
#endif
}

template <int ROWS> void multiply_codes(const void* strip, const char* panel, int deep, void* sums, bool fresh) {
    const uint32_t* x = (const uint32_t*)strip;
    int32_t* to = (int32_t*)sums;
    vi acc[ROWS][PANEL_VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; v++) acc[r][v] = fresh ? vi{} : load_as<vi>(to + r * PANEL + v * W);
    for (int k = 0; k < deep; k += 4, panel += PANEL * 4, x += ROWS) {
        prefetch_panel(panel);
        const vi weights[PANEL_VECS] = {load_as<vi>(panel), load_as<vi>(panel + W * 4)};
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) acc[r][v] = add_products(acc[r][v], x[r], weights[v]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; v++) store(to + r * PANEL + v * W, acc[r][v]);
}

// The inner loops for strips of a height.
struct StripLoops {
    void (*turn)(const float*, int64_t, int64_t, int64_t, float*);
    void (*multiply[4])(const void*, const char*, int, void*, bool);  // by WeightKind
};

template <size_t... I> constexpr std::array<StripLoops, STRIP> strip_loops(std::index_sequence<I...>) {
    return {StripLoops{turn<int(I) + 1>,
                       {multiply<FLOATS, int(I) + 1>, multiply<BF16S, int(I) + 1>, multiply<CODES, int(I) + 1>,
                        multiply_codes<int(I) + 1>}}...};
}

constexpr auto LOOPS = strip_loops(std::make_index_sequence<STRIP>());

// ---- a product ------------------------------------------------------------------------------------------------------

// What becomes of the results.
enum class Then {
    STORE,  // to[row][output] = result
    ADD,    // to[row][output] += result
    GATE,   // to[row][i] = silu(gate i) * up i, for gated weights
};

struct Target {
    Then then;
    float* to;
    int64_t stride;
};

// `rows` rows of `from`, normalised first where `norm` is given, as activations for `layer`. `memory` is kept by the caller.
inline Activations prepare(const PackedLinear& layer, const float* from, int64_t stride, int64_t rows, const float* norm,
                           float eps, Scratch& memory, int threads) {
    const int64_t K = layer.inputs;
    Activations out{Strips(rows), layer.padded(), layer.kind == BOTH_CODES, nullptr, nullptr};
    char* start = memory.start<char>(rows * out.row_bytes() + rows * 4 + 128);
    out.memory = memory.take<char>(rows * out.row_bytes());
    out.row_scales = memory.take<float>(rows);
    (void)start;
    parallel(out.strips.count, rows * K < (1 << 15) ? 1 : threads, [&](int64_t strip) {
        static thread_local Scratch normed;
        const int64_t first = out.strips.first(strip);
        const int height = out.strips.height(strip);
        const float* rows_at = from + first * stride;
        int64_t rows_stride = stride;
        if (norm || layer.hadamard > 1) {
            float* to = normed.start(height * K);
            for (int r = 0; r < height; r++) {
                if (norm)
                    normalise(rows_at + r * stride, norm, to + r * K, int(K), eps);
                else
                    std::memcpy(to + r * K, rows_at + r * stride, K * sizeof(float));
                hadamard(to + r * K, K, layer.hadamard);
            }
            rows_at = to;
            rows_stride = K;
        }
        uint8_t* codes = (uint8_t*)out.strip(strip);
        if (out.is_coded)
            for (int r = 0; r < height; r++)
                out.row_scales[first + r] = code_row(rows_at + r * rows_stride, K, out.padded, height, codes + 4 * r);
        else
            LOOPS[height - 1].turn(rows_at, rows_stride, K, out.padded, (float*)out.strip(strip));
    });
    return out;
}

// Results of one row and panel, [PANEL].
inline void results_of(const PackedLinear& layer, int64_t column, const void* sums, float row_scale, vf* out) {
    for (int v = 0; v < PANEL_VECS; v++) {
        const int64_t at = column + v * W;
        if (layer.kind == BOTH_CODES) {
            const vi exact = load_as<vi>((const int32_t*)sums + v * W) - load_as<vi>(layer.sums + at) * 128;
            out[v] = __builtin_convertvector(exact, vf) * (load(layer.scales + at) * row_scale);
        } else {
            out[v] = load((const float*)sums + v * W);
            if (layer.kind == CODES) out[v] = out[v] * load(layer.scales + at);
        }
        if (layer.bias) out[v] = out[v] + load(layer.bias + at);
    }
}

inline void deliver(const Target& target, int64_t row, int64_t column, int64_t outputs, const vf* results) {
    if (target.then == Then::GATE) {
        store(target.to + row * target.stride + column / 2, silu(results[0]) * results[1]);
        return;
    }
    float* to = target.to + row * target.stride + column;
    for (int v = 0; v < PANEL_VECS; v++, to += W) {
        const int64_t left = outputs - column - v * W;
        if (left >= W) {
            store(to, target.then == Then::ADD ? load(to) + results[v] : results[v]);
        } else {
            for (int i = 0; i < left; i++) to[i] = target.then == Then::ADD ? to[i] + results[v][i] : results[v][i];
        }
    }
}

template <WeightKind KIND>
void product_of_panel(const PackedLinear& layer, const Activations& x, const Target& target, int64_t index, int64_t from_strip,
                      int64_t to_strip) {
    static thread_local Scratch scratch;
    const int64_t K = x.padded, first_row = x.strips.first(from_strip), rows = x.strips.first(to_strip) - first_row;
    const bool is_single = to_strip - from_strip == 1;
    scratch.start(rows * PANEL + DEEP * PANEL + 64);
    float *sums = scratch.take(rows * PANEL), *wide = scratch.take(DEEP * PANEL);
    const char* panel = layer.panel(index);
    const int64_t step = is_single ? K : DEEP;
    for (int64_t k = 0; k < K; k += step) {
        const int deep = int(std::min(step, K - k));
        const char* part = panel + k * PANEL * layer.weight_bytes();
        constexpr bool is_narrow = KIND == BF16S || KIND == CODES;
        if (is_narrow && !is_single) widen_part<KIND>(part, deep, wide);
        for (int64_t strip = from_strip; strip < to_strip; strip++) {
            const int height = x.strips.height(strip);
            const char* at = x.strip(strip) + k * height * (KIND == BOTH_CODES ? 1 : 4);
            float* to = sums + (x.strips.first(strip) - first_row) * PANEL;
            if (is_narrow && !is_single)
                LOOPS[height - 1].multiply[FLOATS](at, (const char*)wide, deep, to, k == 0);
            else
                LOOPS[height - 1].multiply[KIND](at, part, deep, to, k == 0);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        vf results[PANEL_VECS];
        results_of(layer, index * PANEL, sums + r * PANEL, x.row_scales[first_row + r], results);
        deliver(target, first_row + r, index * PANEL, layer.outputs, results);
    }
}

template <WeightKind KIND> void product(const PackedLinear& layer, const Activations& x, const Target& target, int threads) {
    const int64_t panels = layer.num_panels(), strips = x.strips.count;
    const int team = x.strips.rows * layer.inputs * layer.outputs < PRODUCTS_ALONE ? 1 : threads;
    // few panels and many rows: cut rows too, or some threads would have nothing to do at the end
    const int64_t cuts = std::min(strips, std::max<int64_t>(1, (4 * team + panels - 1) / panels));
    const int64_t run = panels >= 8 * PANEL_RUN * team ? PANEL_RUN : 1, runs = (panels + run - 1) / run;
    parallel(runs * cuts, team, [&](int64_t item) {
        const int64_t first = item / cuts * run, cut = item % cuts;
        for (int64_t index = first; index < std::min(first + run, panels); index++)
            product_of_panel<KIND>(layer, x, target, index, cut * strips / cuts, (cut + 1) * strips / cuts);
    });
}

inline void multiply_by(const PackedLinear& layer, const Activations& x, const Target& target, int threads) {
    with_kind(layer.kind, [&](auto kind) { product<kind>(layer, x, target, threads); });
}

}  // namespace mooncake
