// The Hadamard transform that rows go through before they are coded as int8.
//
// A row has one scale, which its largest element sets; a few channels are ten or a hundred times larger than the rest, and
// the rest is lost. Mixed with each other, the channels of a block are all of nearly one size. Weights hold the same
// transform, so that products stay what they were (QuaRot, Ashkboos et al. 2024; there over whole rows, here over blocks
// that fit into registers, which need no work at load time on what comes before).
#pragma once

#include "vectors.h"

namespace mooncake {

template <int STEP, int... LANE> constexpr vi partners(std::integer_sequence<int, LANE...>) { return vi{(LANE ^ STEP)...}; }
template <int STEP, int... LANE> constexpr vf signs(std::integer_sequence<int, LANE...>) {
    return vf{(LANE & STEP ? -1.0f : 1.0f)...};
}

// Sums and differences of lanes that are STEP, 2 STEP, .. W / 2 apart.
template <int STEP> inline vf mix_lanes(vf v) {
    if constexpr (STEP >= W) {
        return v;
    } else {
        constexpr auto lanes = std::make_integer_sequence<int, W>();
        return mix_lanes<STEP * 2>(__builtin_shuffle(v, partners<STEP>(lanes)) + v * signs<STEP>(lanes));
    }
}

// One block of SIZE elements times Sylvester's matrix of ones and minus ones, in place.
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

// `block` divides `count` and is 1 (nothing happens), 16, 32 or 64.
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
