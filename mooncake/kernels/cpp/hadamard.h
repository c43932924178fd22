// The Hadamard transform applied to rows before they are quantised to int8.
//
// A row has one scale, set by its largest element. A few channels are ten or a hundred times larger than the rest,
// which would then lose its precision. Mixed with each other, the channels of a block are all of about the same size.
// Weights contain the same transform, so products are unchanged (QuaRot, Ashkboos et al. 2024; there over whole rows,
// here over blocks that fit into registers, so earlier layers need no changes at load time).
#pragma once

#include "vectors.h"

namespace mooncake {

template <int STEP, int... LANE> constexpr vi partners(std::integer_sequence<int, LANE...>) { return vi{(LANE ^ STEP)...}; }
template <int STEP, int... LANE> constexpr vf signs(std::integer_sequence<int, LANE...>) {
    return vf{(LANE & STEP ? -1.0f : 1.0f)...};
}

// Sums and differences of lanes STEP, 2 STEP, .. W / 2 apart.
template <int STEP> inline vf mix_lanes(vf v) {
    if constexpr (STEP >= W) {
        return v;
    } else {
        constexpr auto lanes = std::make_integer_sequence<int, W>();
        return mix_lanes<STEP * 2>(__builtin_shuffle(v, partners<STEP>(lanes)) + v * signs<STEP>(lanes));
    }
}

// Multiplies one block of SIZE elements by Sylvester's matrix of ones and minus ones, in place.
template <int SIZE> inline void hadamard_block(float* x) {
    constexpr int VECS = SIZE / W;
    vf v[VECS];
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) v[i] = mix_lanes<1>(load(x + i * W));
#pragma GCC unroll 16
    for (int step = 1; step < VECS; step *= 2)
#pragma GCC unroll 16
        for (int i = 0; i < VECS; i++)
            if (!(i & step)) {
                const vf a = v[i], b = v[i + step];
                v[i] = a + b;
                v[i + step] = a - b;
            }
#pragma GCC unroll 16
    for (int i = 0; i < VECS; i++) store(x + i * W, v[i]);
}

// `block` divides `count` and is 1 (no transform), 16, 32 or 64.
inline void hadamard(float* row, int64_t count, int block) {
    if (block == 1) return;
    for (float* end = row + count; row < end; row += block) {
        if (block == 64)
            hadamard_block<64>(row);
        else if (block == 32)
            hadamard_block<32>(row);
        else
            hadamard_block<16>(row);
    }
}

}  // namespace mooncake
