// Weight matrices as products read them: float32, bfloat16 or int8, in panels of PANEL outputs.
//
// For every G inputs a panel has the G weights of its first output, of its second, and so on. G is what makes the weights of an
// input cheapest to get: bfloat16 ones in pairs and int8 ones in fours, as the instructions that multiply them take them (lanes
// or tiles of 32 bits, see units.h and tiles.h); one by one else. Memory is read once, in one stream a thread.
#pragma once

#include <type_traits>

#include "hadamard.h"
#include "pool.h"
#include "vectors.h"

namespace mooncake {

// How weights are held, and what activations become. CODES: int8 weights with a scale an output, activations float32.
// BOTH_CODES: activations are int8 too, with a scale a row, and sums are int32 (W8A8); see hadamard.h. WIDE_CODES: int8 weights, and
// activations of 16 bits with a scale a row, as two planes of 8 (processors multiply whole numbers of no other width).
enum WeightKind : int32_t { FLOATS = 0, BF16S = 1, CODES = 2, BOTH_CODES = 3, WIDE_CODES = 4 };

template <WeightKind KIND> using Held = std::conditional_t<KIND == FLOATS, float, std::conditional_t<KIND == BF16S, bf16, int8_t>>;
template <WeightKind KIND> constexpr int G = KIND == BF16S ? 2 : KIND == BOTH_CODES || KIND == WIDE_CODES ? 4 : 1;

// body(k) for `kind` as a constant.
template <class Body> auto with_kind(int32_t kind, const Body& body) {
    switch (kind) {
        case BF16S: return body(std::integral_constant<WeightKind, BF16S>{});
        case CODES: return body(std::integral_constant<WeightKind, CODES>{});
        case BOTH_CODES: return body(std::integral_constant<WeightKind, BOTH_CODES>{});
        case WIDE_CODES: return body(std::integral_constant<WeightKind, WIDE_CODES>{});
        default: return body(std::integral_constant<WeightKind, FLOATS>{});
    }
}

constexpr int PANEL_VECS = 2;
constexpr int PANEL = W * PANEL_VECS;  // outputs whose weights lie interleaved
constexpr int ROW_UNIT = 64;           // bytes; a row of weights or activations is filled up to a whole number of them

// One packed weight matrix; mirrored in cpu.py. Everything is padded with zeros: outputs to PANEL, rows to ROW_UNIT.
struct PackedLinear {
    const void* panels;
    const float* bias;    // [outputs] or null
    const float* scales;  // [outputs], of int8 weights
    const int32_t* sums;  // [outputs]: sums of codes, for activations that are codes, too
    const float* levels;  // [16]: what grouped codes of 4 bits stand for
    int64_t inputs, outputs;
    int32_t kind;
    int32_t is_gated;     // each panel has W gates and then their W ups: `outputs` counts both
    int32_t hadamard;     // inputs in a block of the transform before coding; 1 for none
    int32_t code_bits;    // 4 or 8: panels hold grouped codes (see grouped.h), multiplied as weights of `kind`; 0: weights
    int32_t group;        // inputs that share a scale, of grouped codes
    int32_t has_offsets;

    int weight_bytes() const { return kind == FLOATS ? 4 : kind == BF16S ? 2 : 1; }
    int64_t row_bytes() const { return (inputs * weight_bytes() + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT; }
    int64_t padded() const { return row_bytes() / weight_bytes(); }  // inputs
    int64_t num_panels() const { return (outputs + PANEL - 1) / PANEL; }
    int64_t group_bytes() const { return PANEL * (int64_t(sizeof(float)) * (1 + has_offsets) + group * code_bits / 8); }
    int64_t panel_bytes() const { return code_bits ? inputs / group * group_bytes() : row_bytes() * PANEL; }
    const char* panel(int64_t index) const { return (const char*)panels + index * panel_bytes(); }
};

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

// Row `at` of a packed matrix of weights as float32 [inputs].
inline void unpack_weights(const PackedLinear& layer, int64_t at, float* out) {
    with_kind(layer.kind, [&](auto kind) {
        const auto* panel = (const Held<kind>*)layer.panel(at / PANEL);
        for (int64_t k = 0; k < layer.inputs; k++) out[k] = to_float(panel[place<kind>(k, at % PANEL)]);
    });
    hadamard(out, layer.inputs, layer.hadamard);  // its own inverse, but for the factor that packing took out
    if (layer.scales)
        for (int64_t k = 0; k < layer.inputs; k++) out[k] *= layer.scales[at];
}

}  // namespace mooncake
