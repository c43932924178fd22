// Weight matrices as products read them: float32, bfloat16 or int8, in panels of PANEL outputs.
//
// For every G inputs a panel holds the G weights of its first output, then of its second, and so on. G makes weights
// cheapest to load: pairs of bfloat16 and fours of int8, as the instructions that multiply them take them (lanes or
// tiles of 32 bits, see linear.h and tiles.h); otherwise single weights. Memory is read once, in one stream per thread.
#pragma once

#include <type_traits>

#include "hadamard.h"
#include "pool.h"
#include "vectors.h"

namespace mooncake {

// How weights are stored, and what activations become. CODES: int8 weights with a scale per output, float32
// activations. BOTH_CODES: activations are int8 too, with a scale per row, and sums are int32 (W8A8); see hadamard.h.
// WIDE_CODES: int8 weights, and 16-bit activations with a scale per row, as two 8-bit planes (processors multiply
// integers of no other width). GROUPED_CODES: codes with a scale per group of inputs, and int8 activations with a scale
// per row and group; see grouped.h.
enum WeightKind : int32_t { FLOATS = 0, BF16S = 1, CODES = 2, BOTH_CODES = 3, WIDE_CODES = 4, GROUPED_CODES = 5 };

template <WeightKind KIND> using Held = std::conditional_t<KIND == FLOATS, float, std::conditional_t<KIND == BF16S, bf16, int8_t>>;
template <WeightKind KIND> constexpr int G = KIND == BF16S ? 2 : KIND >= BOTH_CODES ? 4 : 1;

// Calls body(k) with `kind` as a constant.
template <class Body> auto with_kind(int32_t kind, const Body& body) {
    switch (kind) {
        case BF16S: return body(std::integral_constant<WeightKind, BF16S>{});
        case CODES: return body(std::integral_constant<WeightKind, CODES>{});
        case BOTH_CODES: return body(std::integral_constant<WeightKind, BOTH_CODES>{});
        case WIDE_CODES: return body(std::integral_constant<WeightKind, WIDE_CODES>{});
        case GROUPED_CODES: return body(std::integral_constant<WeightKind, GROUPED_CODES>{});
        default: return body(std::integral_constant<WeightKind, FLOATS>{});
    }
}

constexpr int PANEL_VECS = 2;
constexpr int PANEL = W * PANEL_VECS;  // outputs whose weights are interleaved
constexpr int ROW_UNIT = 64;           // bytes; rows of weights or activations are padded to a multiple of this

// One packed weight matrix; mirrored in cpu_library.py. Everything is zero-padded: outputs to PANEL, rows to ROW_UNIT.
struct PackedLinear {
    const void* panels;
    const float* bias;    // [outputs] or null
    const float* scales;  // [outputs], for int8 weights
    const int32_t* sums;  // [outputs]: sums of codes, for activations that are codes too
    const float* levels;  // [16]: the values of grouped 4-bit codes
    const uint8_t* bytes;  // [16]: the same as bytes around `middle`, for GROUPED_CODES
    int64_t inputs, outputs;
    int32_t kind;
    int32_t is_gated;     // each panel has W gates and then their W ups; `outputs` counts both
    int32_t hadamard;     // inputs per block of the transform before quantising; 1: none
    int32_t code_bits;    // 4 or 8: panels hold grouped codes (grouped.h), multiplied as weights of `kind`; 0: weights
    int32_t group;        // inputs that share a scale, for grouped codes
    int32_t has_offsets;
    int32_t middle;       // GROUPED_CODES: the byte that stands for 0

    int weight_bytes() const { return kind == FLOATS ? 4 : kind == BF16S ? 2 : 1; }
    int64_t row_bytes() const { return (inputs * weight_bytes() + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT; }
    int64_t padded() const { return row_bytes() / weight_bytes(); }  // inputs
    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t group_bytes() const { return PANEL * (int64_t(sizeof(float)) * (1 + has_offsets) + group * code_bits / 8); }
    int64_t panel_bytes() const { return code_bits ? inputs / group * group_bytes() : row_bytes() * PANEL; }
    const char* panel(int64_t index) const { return (const char*)panels + index * panel_bytes(); }
};

// Row of the published matrix that becomes output `at` of the packed one. The published one has all gates first.
inline int64_t source_row(const PackedLinear& layer, int64_t at) {
    if (!layer.is_gated) return at;
    const int64_t within = at % PANEL;
    return at / PANEL * W + within % W + (within < W ? 0 : layer.outputs / 2);
}

// Index in its panel of the weight of input k and the panel's output i.
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

// Row `at` of a packed matrix of weights as float32 [inputs].
inline void unpack_weights(const PackedLinear& layer, int64_t at, float* out) {
    with_kind(layer.kind, [&](auto kind) {
        const auto* panel = (const Held<kind>*)layer.panel(at / PANEL);
        for (int64_t k = 0; k < layer.inputs; k++) out[k] = to_float(panel[place<kind>(k, at % PANEL)]);
    });
    hadamard(out, layer.inputs, layer.hadamard);  // its own inverse, except for the factor that packing removed
    if (layer.scales)
        for (int64_t k = 0; k < layer.inputs; k++) out[k] *= layer.scales[at];
}

}  // namespace mooncake
