// Sums of values weighted by softmax weights on the matrix unit, for methods that read a part of a context once
// (attend_dots, attend_shared_tiles). Weights are rounded to bfloat16, those of int8 pages once their scales are in them;
// int8 codes are exact in it.
#pragma once

#include "attention_plan.h"

namespace mooncake {

constexpr int MIX_DIMS = 4 * W;  // dimensions that one pass mixes: sums of a tile of query rows are four tiles

// Weights of a part as tiles: [row / 16][token / 32][16][32], of bfloat16. Strips of tokens begin at multiples of 32 of
// the context, wherever a part begins: so what a row sees is added up in the same order whatever is mixed with it.
class WeightTiles {
public:
    WeightTiles(bf16* memory, int strips) : memory_(memory), strips_(strips) {}

    static constexpr int TILE = TILE_ROWS * STRIP_TOKENS;
    static int64_t floats(int rows, int strips) { return int64_t(rows + TILE_ROWS - 1) / TILE_ROWS * strips * TILE / 2; }

    int strips() const { return strips_; }
    bf16* tile(int group, int strip) const { return memory_ + int64_t(group * strips_ + strip) * TILE; }
    // W weights of a row; `token` is a multiple of W.
    void put(int row, int token, vf weights) const {
        store(tile(row / TILE_ROWS, token / STRIP_TOKENS) + row % TILE_ROWS * STRIP_TOKENS + token % STRIP_TOKENS, weights);
    }

private:
    bf16* memory_;
    int strips_;
};

#if defined(MOONCAKE_TILES)

// Dimensions d .. d + 2 W of two tokens in pairs, in the order that unpacking halves of 16 bytes gives: `in_order` undoes it.
inline void pair_up(const bf16* first, const bf16* second, __m512i* pairs) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    pairs[0] = _mm512_unpacklo_epi16(a, b);
    pairs[1] = _mm512_unpackhi_epi16(a, b);
}
inline void pair_up(const int8_t* first, const int8_t* second, __m512i* pairs) {
    for (int i = 0; i < 2; i++)  // the lower half of a code's float32 is 0
        pairs[i] = (__m512i)((vu)load(first + i * W) >> 16 | (vu)load(second + i * W));
}

// The next dimensions of a strip of V as tiles, [dimension / 16][pair of tokens][16]. Prefetches rows further on.
template <class T> inline void tiles_of_values(const T* const* values, int d, int dims, int ahead, uint32_t* out) {
    for (int pair = 0; pair < TILE_ROWS; pair++, values += 2, out += W) {
        bring_near(values + ahead, 2, d, dims);
        for (int i = 0; i < dims; i += 2 * W) {
            __m512i pairs[2];
            pair_up(values[0] + d + i, values[1] + d + i, pairs);
            _mm512_store_si512(out + i * W, pairs[0]);
            _mm512_store_si512(out + i * W + W * W, pairs[1]);
        }
    }
}

// Rows of D whose dimensions have the order of `pair_up`, in place or elsewhere.
template <class T> inline void in_order(const float* mixed, int D, float* out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    for (int d = 0; d < D; d += 2 * W) {
        __m512 low = _mm512_loadu_ps(mixed + d), high = _mm512_loadu_ps(mixed + d + W);
        if (!IS_CODED<T>) {
            const __m512 lower = _mm512_permutex2var_ps(low, first, high);
            high = _mm512_permutex2var_ps(low, _mm512_add_epi32(first, _mm512_set1_epi32(8)), high);
            low = lower;
        }
        _mm512_storeu_ps(out + d, low);
        _mm512_storeu_ps(out + d + W, high);
    }
}

// mixed[row][D] = sum over tokens of weights[row][token] * values[token], for whole tiles of rows; `in_order` puts its
// dimensions right. `values` has STRIP_TOKENS entries for each strip, and `ahead` more to be prefetched; `strips` has room
// for the part in MIX_DIMS dimensions. Calls weigh(strip) before the weights of a strip are read. Needs Tiles(TILE_STRIP).
template <class T, class Weigh>
inline void mix_in_tiles(const WeightTiles& weights, int rows, const T* const* values, int ahead, int D, uint32_t* strips, float* mixed,
                         const Weigh& weigh) {
    constexpr int STRIP = MIX_DIMS * W;  // of a strip of values, in pairs
    for (int d = 0; d < D; d += MIX_DIMS) {
        const int dims = std::min(MIX_DIMS, D - d);
        const auto prepare = [&](int strip) {
            if (strip == weights.strips()) return;
            if (d == 0) weigh(strip);
            tiles_of_values(values + strip * STRIP_TOKENS, d, dims, ahead, strips + strip * STRIP);
        };
        prepare(0);
        for (int row = 0; row < rows; row += TILE_ROWS) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int strip = 0; strip < weights.strips(); strip++) {
                if (row == 0) prepare(strip + 1);  // one strip ahead of what is multiplied, so that stores have arrived
                settle_memory();
                const uint32_t* from = strips + strip * STRIP;
                _tile_loadd(4, weights.tile(row / TILE_ROWS, strip), ROW_UNIT);
                _tile_loadd(6, from, ROW_UNIT);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, from + W * W, ROW_UNIT);
                _tile_dpbf16ps(1, 4, 7);
                if (dims < MIX_DIMS) continue;
                _tile_loadd(6, from + 2 * W * W, ROW_UNIT);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, from + 3 * W * W, ROW_UNIT);
                _tile_dpbf16ps(3, 4, 7);
            }
            float* to = mixed + row * int64_t(D) + d;
            const int64_t stride = D * int64_t(sizeof(float));
            _tile_stored(0, to, stride);
            _tile_stored(1, to + W, stride);
            if (dims < MIX_DIMS) continue;
            _tile_stored(2, to + 2 * W, stride);
            _tile_stored(3, to + 3 * W, stride);
        }
    }
}

#else

template <class T> void in_order(const float*, int, float*) {}
template <class T, class Weigh>
void mix_in_tiles(const WeightTiles&, int, const T* const*, int, int, uint32_t*, float*, const Weigh&) {}

#endif

}  // namespace mooncake
