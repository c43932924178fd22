// Weights stored as 4- or 8-bit codes, with a scale and possibly an offset per group of inputs of an output. They stay
// codes in memory; part of a panel at a time is dequantised to float32 or bfloat16 just before it is multiplied.
//
// A weight is level * scale + offset, rounded once to float32 (the product is exact: level and scale together have at
// most 24 significant bits) and, in a bfloat16 model, once more to bfloat16. These are the bits of the published values,
// so products are bit-identical too.
//
// GROUPED_CODES are not dequantised: activations become int8, with a scale per row and group, and an output is the sum
// over groups of scale * activation scale * (sum of level * code, an integer) + offset * (sum of activations). Levels are
// bytes there, around `middle`, because the instructions need one unsigned side.
#pragma once

#include "activations.h"

namespace mooncake {

constexpr int CODES_AHEAD = 6144;  // bytes to prefetch ahead, as for other weights

// A panel holds, group by group, PANEL scales, PANEL offsets if there are any, and the codes in units of PANEL * 4
// bytes. A unit holds the codes of 4 inputs (8 bits), one input after another, or of 8 inputs (4 bits): one 32-bit lane
// per output, the first input in the lowest bits.
template <int BITS> constexpr int UNIT_CODES = 32 / BITS;

// How levels of 4-bit codes are found. With 8 lanes a table of 16 takes two lookups and a choice, and in most files they
// are one apart.
enum class Levels { TABLE, EVEN };

inline bool are_even(const float* levels) {
    for (int i = 1; i < 16; i++)
        if (levels[i] != levels[0] + float(i)) return false;
    return true;
}

// The levels of a unit's codes for input `at` and vector v of outputs.
template <int BITS, Levels LEVELS> inline vf level_of(const char* unit, int at, int v, const float* levels) {
    if constexpr (BITS == 8) {
        return load((const int8_t*)unit + at * PANEL + v * W);
    } else if constexpr (LEVELS == Levels::EVEN) {
        return __builtin_convertvector((vi)(load_as<vu>(unit + v * W * 4) >> 4 * at & 15), vf) + levels[0];
    } else {
        const vi lanes = load_as<vi>(unit + v * W * 4);
#if defined(__AVX512F__)
        return (vf)_mm512_permutexvar_ps((__m512i)((vu)lanes >> 4 * at), _mm512_loadu_ps(levels));  // only the low 4 bits count
#elif defined(__AVX2__)
        const __m256i places = (__m256i)((vu)lanes >> 4 * at);
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), places);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), places);
        return (vf)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(places, 28));
#else
        vf out;
        for (int i = 0; i < W; i++) out[i] = levels[lanes[i] >> 4 * at & 15];
        return out;
#endif
    }
}

// The scales, offsets and codes of one group in a panel.
struct Group {
    vf scales[PANEL_VECS], offsets[PANEL_VECS];
    const char* codes;

    Group(const PackedLinear& layer, const char* at) {
        const auto* numbers = (const float*)at;
        for (int v = 0; v < PANEL_VECS; v++) {
            scales[v] = load(numbers + v * W);
            offsets[v] = layer.has_offsets ? load(numbers + PANEL + v * W) : vf{};
        }
        codes = at + PANEL * sizeof(float) * (1 + layer.has_offsets);
    }

    template <int BITS, Levels LEVELS> vf weights(const char* unit, int at, int v, const float* levels) const {
        return level_of<BITS, LEVELS>(unit, at, v, levels) * scales[v] + offsets[v];
    }
};

inline vf rounded_to_bf16(vf weights) {
    bf16 narrow[W];
    store(narrow, weights);
    return load(narrow);
}

inline void prefetch_codes(const char* at) {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECS; v++) __builtin_prefetch(at + CODES_AHEAD + v * W * 4, 0, NEAR);
}

// Layout of unpacked weights: float32 [input][PANEL], the same rounded to bfloat16, or bfloat16 pairs [input /
// 2][PANEL].
enum class Form { FLOATS, ROUNDED, PAIRS };

template <int BITS, Levels LEVELS, Form FORM>
void unpack_groups(const PackedLinear& layer, const char* panel, int64_t from, int64_t to, void* out) {
    constexpr int N = UNIT_CODES<BITS>;
    char* at = (char*)out;
    for (int64_t k = from; k < to;) {
        const Group group(layer, panel + k / layer.group * layer.group_bytes());
        const int64_t stop = std::min((k / layer.group + 1) * layer.group, to);
        const char* codes = group.codes + k % layer.group / N * PANEL * 4;
        for (; k < stop; k += N, codes += PANEL * 4, at += N * PANEL * (FORM == Form::PAIRS ? 2 : 4)) {
            prefetch_codes(codes);
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) {
                vf before{};
#pragma GCC unroll 8
                for (int i = 0; i < N; i++) {
                    vf weights = group.weights<BITS, LEVELS>(codes, i, v, layer.levels);
                    if (FORM == Form::ROUNDED) weights = rounded_to_bf16(weights);
                    if (FORM != Form::PAIRS)
                        store((float*)at + i * PANEL + v * W, weights);
                    else if (i % 2)
                        store((int32_t*)at + i / 2 * PANEL + v * W, pairs_of(before, weights));
                    before = weights;
                }
            }
        }
    }
}

// sums[row][PANEL]: a strip of ROWS rows times a whole panel, summed as in `multiply` and `multiply_units`, but without
// writing the weights to memory.
template <WeightKind KIND, int BITS, Levels LEVELS, int ROWS>
void multiply_codes(const PackedLinear& layer, const char* panel, const char* strip, float* sums) {
    constexpr bool IN_PAIRS = KIND == BF16S && MULTIPLIES_BF16;
    constexpr int N = UNIT_CODES<BITS>;
    vf acc[ROWS][PANEL_VECS] = {};
    for (int64_t groups = layer.inputs / layer.group; groups > 0; groups--, panel += layer.group_bytes()) {
        const Group group(layer, panel);
        const char* codes = group.codes;
        for (int64_t k = 0; k < layer.group; k += N, codes += PANEL * 4) {
            prefetch_codes(codes);
#pragma GCC unroll 8
            for (int i = 0; i < N; i += 1 + IN_PAIRS, strip += ROWS * 4) {
                std::conditional_t<IN_PAIRS, vi, vf> weights[PANEL_VECS];
#pragma GCC unroll 2
                for (int v = 0; v < PANEL_VECS; v++) {
                    const vf first = group.weights<BITS, LEVELS>(codes, i, v, layer.levels);
                    if constexpr (IN_PAIRS)
                        weights[v] = pairs_of(first, group.weights<BITS, LEVELS>(codes, i + 1, v, layer.levels));
                    else
                        weights[v] = KIND == BF16S ? rounded_to_bf16(first) : first;
                }
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < PANEL_VECS; v++)
                        if constexpr (IN_PAIRS)
                            acc[r][v] = add_products(acc[r][v], ((const uint32_t*)strip)[r], weights[v]);
                        else
                            acc[r][v] += weights[v] * ((const float*)strip)[r];
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; v++) store(sums + r * PANEL + v * W, acc[r][v]);
}

// The bytes of a vector's 4-bit codes, which are the low halves of `lanes`' bytes.
inline vi bytes_of(vi lanes, const uint8_t* bytes) {
    const vi codes = lanes & 0x0f0f0f0f;
#if defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes)), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes)), (__m256i)codes);
#else
    uint8_t each[W * 4];
    std::memcpy(each, &codes, sizeof each);
    for (uint8_t& code : each) code = bytes[code];
    return load_as<vi>(each);
#endif
}

// The part of `multiply_groups` for VECS vectors of outputs from `first` on.
template <int BITS, int ROWS, int VECS>
void multiply_groups_of(const PackedLinear& layer, const char* panel, int first, const char* strip, float* sums) {
    vf acc[ROWS][VECS] = {};
    for (int64_t groups = layer.inputs / layer.group; groups > 0; groups--, panel += layer.group_bytes()) {
        const Group group(layer, panel);
        const auto* heads = (const GroupHead*)strip;
        const auto* x = (const uint32_t*)(strip + ROWS * sizeof(GroupHead));
        const char* codes = group.codes + first * W * 4;
        vi part[ROWS][VECS];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) part[r][v] = vi{} + heads[r].start;
        const auto add = [&](const vi* weights) {
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                for (int v = 0; v < VECS; v++) part[r][v] = add_unsigned_products(part[r][v], x[r], weights[v]);
            x += ROWS;
        };
        for (int64_t k = 0; k < layer.group; k += UNIT_CODES<BITS>, codes += PANEL * 4) {
            vi weights[VECS], others[VECS];
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) {
                __builtin_prefetch(codes + CODES_AHEAD + v * W * 4, 0, NEAR);
                weights[v] = load_as<vi>(codes + v * W * 4);
                if (BITS == 8) continue;
                others[v] = bytes_of(weights[v] >> 4, layer.bytes);
                weights[v] = bytes_of(weights[v], layer.bytes);
            }
            add(weights);
            if (BITS == 4) add(others);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECS; v++) {
                acc[r][v] += __builtin_convertvector(part[r][v], vf) * group.scales[first + v] * heads[r].scale;
                if (layer.has_offsets) acc[r][v] += group.offsets[first + v] * heads[r].sum;
            }
        strip = (const char*)x;
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) store(sums + r * PANEL + (first + v) * W, acc[r][v]);
}

// sums[row][PANEL]: a strip of ROWS rows times a whole panel of GROUPED_CODES. With many rows the panel's vectors come one
// after another: their sums fill the registers.
template <int BITS, int ROWS> void multiply_groups(const PackedLinear& layer, const char* panel, const char* strip, float* sums) {
    constexpr int VECS = ROWS > STRIP / 2 ? 1 : PANEL_VECS;
    for (int v = 0; v < PANEL_VECS; v += VECS) multiply_groups_of<BITS, ROWS, VECS>(layer, panel, v, strip, sums);
}

using MultiplyCodes = void (*)(const PackedLinear&, const char*, const char*, float*);

template <WeightKind KIND, int BITS, Levels LEVELS, size_t... I> constexpr auto loops_of_codes(std::index_sequence<I...>) {
    return std::array<MultiplyCodes, STRIP>{multiply_codes<KIND, BITS, LEVELS, int(I) + 1>...};
}

// Indexed by strip height - 1; for KIND FLOATS or BF16S.
template <WeightKind KIND, int BITS, Levels LEVELS>
constexpr auto MULTIPLY_CODES = loops_of_codes<KIND, BITS, LEVELS>(std::make_index_sequence<STRIP>());

// Calls body(bits, levels) with what a layer's codes are as constants.
template <class Body> void with_codes(const PackedLinear& layer, const Body& body) {
    using Four = std::integral_constant<int, 4>;
    using Table = std::integral_constant<Levels, Levels::TABLE>;
    if (layer.code_bits == 8) return body(std::integral_constant<int, 8>{}, Table{});
    if constexpr (W < 16)
        if (are_even(layer.levels)) return body(Four{}, std::integral_constant<Levels, Levels::EVEN>{});
    body(Four{}, Table{});
}

template <int BITS, size_t... I> constexpr auto loops_of_groups(std::index_sequence<I...>) {
    return std::array<MultiplyCodes, STRIP>{multiply_groups<BITS, int(I) + 1>...};
}

// Indexed by strip height - 1.
template <int BITS> constexpr auto MULTIPLY_GROUPS = loops_of_groups<BITS>(std::make_index_sequence<STRIP>());

// Unpacks inputs from .. to of a panel, both multiples of 8, into the form that products with activations of `unit`
// bytes take.
inline void unpack_part(const PackedLinear& layer, int64_t index, int64_t from, int64_t to, int unit, void* out) {
    with_codes(layer, [&](auto bits, auto levels) {
        const auto with_form = [&](auto form) { unpack_groups<bits, levels, form>(layer, layer.panel(index), from, to, out); };
        if (layer.kind == FLOATS)
            with_form(std::integral_constant<Form, Form::FLOATS>{});
        else if (unit)
            with_form(std::integral_constant<Form, Form::PAIRS>{});
        else
            with_form(std::integral_constant<Form, Form::ROUNDED>{});
    });
}

// GROUPED_CODES come in fours of inputs, a byte each; of 4 bits, the next four are in the upper halves of those bytes.
inline void put_grouped(char* to, int64_t k, int i, uint8_t code, bool are_bytes) {
    if (are_bytes)
        to[k / 4 * PANEL * 4 + i * 4 + k % 4] = char(code ^ 128);  // -128 .. 127 to 0 .. 255
    else
        to[k / 8 * PANEL * 4 + i * 4 + k % 4] |= char(code << k % 8 / 4 * 4);
}

inline int grouped_byte(const PackedLinear& layer, const char* codes, int64_t k, int64_t i) {
    if (layer.code_bits == 8) return uint8_t(codes[k / 4 * PANEL * 4 + i * 4 + k % 4]);
    return layer.bytes[uint8_t(codes[k / 8 * PANEL * 4 + i * 4 + k % 4]) >> k % 8 / 4 * 4 & 15];
}

// `codes` [outputs][inputs], one byte each; scales and offsets [outputs][inputs / group].
inline void pack_groups(const PackedLinear& layer, const uint8_t* codes, const float* scales, const float* offsets, char* panels,
                        int threads) {
    const int64_t K = layer.inputs, groups = K / layer.group;
    const bool are_bytes = layer.code_bits == 8;
    parallel(layer.num_panels(), threads, [&](int64_t p) {
        char* panel = panels + p * layer.panel_bytes();
        std::memset(panel, 0, layer.panel_bytes());
        for (int i = 0; i < PANEL && p * PANEL + i < layer.outputs; i++) {
            const int64_t row = source_row(layer, p * PANEL + i);
            for (int64_t g = 0; g < groups; g++) {
                char* record = panel + g * layer.group_bytes();
                ((float*)record)[i] = scales[row * groups + g];
                if (layer.has_offsets) ((float*)record)[PANEL + i] = offsets[row * groups + g];
                char* to = record + PANEL * sizeof(float) * (1 + layer.has_offsets);
                const uint8_t* from = codes + row * K + g * layer.group;
                for (int64_t k = 0; k < layer.group; k++)
                    if (layer.kind == GROUPED_CODES)
                        put_grouped(to, k, i, from[k], are_bytes);
                    else if (are_bytes)
                        to[k * PANEL + i] = char(from[k]);
                    else
                        ((uint32_t*)to)[k / 8 * PANEL + i] |= uint32_t(from[k]) << k % 8 * 4;
            }
        }
    });
}

// Row `at` of GROUPED_CODES as float32 [inputs].
inline void unpack_grouped(const PackedLinear& layer, int64_t at, float* out) {
    const int64_t i = at % PANEL;
    const char* record = layer.panel(at / PANEL);
    for (int64_t first = 0; first < layer.inputs; first += layer.group, record += layer.group_bytes()) {
        const auto* numbers = (const float*)record;
        const float scale = numbers[i], offset = layer.has_offsets ? numbers[PANEL + i] : 0.0f;
        const char* codes = record + PANEL * sizeof(float) * (1 + layer.has_offsets);
        for (int64_t k = 0; k < layer.group; k++)
            out[first + k] = float(grouped_byte(layer, codes, k, i) - layer.middle) * scale + offset;
    }
}

// Row `at` of the packed matrix as float32 [inputs].
inline void unpack_row(const PackedLinear& layer, int64_t at, float* out) {
    if (!layer.code_bits) return unpack_weights(layer, at, out);
    if (layer.kind == GROUPED_CODES) return unpack_grouped(layer, at, out);
    alignas(64) float part[8 * PANEL];
    PackedLinear floats = layer;
    floats.kind = FLOATS;
    for (int64_t k = 0; k < layer.inputs; k += 8) {
        unpack_part(floats, at / PANEL, k, k + 8, 0, part);
        for (int i = 0; i < 8; i++) {
            const float weight = part[i * PANEL + at % PANEL];
            out[k + i] = layer.kind == BF16S ? to_float(to_bf16(weight)) : weight;
        }
    }
}

}  // namespace mooncake
