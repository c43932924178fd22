// Vectors of floats as wide as the machine's, on GCC's vector extension: the same source gives AVX-512, AVX2, SSE and
// NEON. Loads widen bfloat16 and int8 to float32; all arithmetic is float32.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <utility>

namespace mooncake {

#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr bool IS_ZEN = true;
#else
constexpr bool IS_ZEN = false;
#endif

// Locality argument of __builtin_prefetch. Data needed soon goes to L1; but a Zen core can have only a few L1 fills in
// flight, and half as many again into L2.
constexpr int SECOND_CACHE = 2;
constexpr int NEAR = IS_ZEN ? SECOND_CACHE : 3;

// The same for rows of K and V, of which a page has only a few in a row. A core with a matrix unit gets them sooner by way of
// the second cache, too (measured on one such processor, family 6, model 167).
#if defined(__AMX_TILE__)
constexpr int ROWS_NEAR = SECOND_CACHE;
#else
constexpr int ROWS_NEAR = NEAR;
#endif

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

// Whether a product takes a number from memory for all its lanes. Where it does not, GCC 12 reads the other side from
// memory instead, again for each product, unless it is told what to keep in registers.
#if defined(__AVX512F__)
constexpr bool FOLDS_BROADCASTS = true;
#else
constexpr bool FOLDS_BROADCASTS = false;
#endif

using vf = float __attribute__((vector_size(W * 4)));
using vi = int32_t __attribute__((vector_size(W * 4)));
using vu = uint32_t __attribute__((vector_size(W * 4)));
using vh = uint16_t __attribute__((vector_size(W * 2)));
using vc = int8_t __attribute__((vector_size(W)));

struct bf16 {
    uint16_t bits;
};

template <class V, class T> inline V load_as(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// A value that is in a register from here on: GCC would read a vector from memory again for each product that uses it, and
// a core loads no more than it multiplies. What made it is not fused with what follows.
template <class V> inline V in_register(V value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
    return value;
}

inline vf load(const float* from) { return load_as<vf>(from); }
inline vf load(const bf16* from) {
#if defined(__AVX512F__)  // GCC 12 splits the general form into halves, and the next one into single lanes
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#endif
    return (vf)(__builtin_convertvector(load_as<vh>(from), vu) << 16);
}
inline vf load(const int8_t* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
    return __builtin_convertvector(__builtin_convertvector(load_as<vc>(from), vi), vf);
}

inline void store(float* to, vf v) { std::memcpy(to, &v, sizeof v); }
inline void store(int32_t* to, vi v) { std::memcpy(to, &v, sizeof v); }

inline void store(bf16* to, vf v) {  // round to nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(to, &narrow, sizeof narrow);
    return;
#endif
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = v != v ? (bits >> 16 | 0x40) : rounded;
    vh half = __builtin_convertvector(rounded, vh);
    std::memcpy(to, &half, sizeof half);
}

// As float32, what bfloat16 makes of it.
inline vf rounded(vf v) {
    bf16 narrow[W];
    store(narrow, v);
    return load(narrow);
}

// 2 * W values as bfloat16, two per lane.
inline vf in_pairs(vf first, vf second) {
#if defined(__AVX512BF16__)  // through memory, a load would wait for two stores
    return (vf)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#endif
    bf16 narrow[2 * W];
    store(narrow, first);
    store(narrow + W, second);
    return load_as<vf>(narrow);
}

// Codes 0 .. 255, or -128 .. 127 by their bit patterns.
inline void store(uint8_t* to, vi v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#else
    const vc narrow = __builtin_convertvector(v, vc);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_BF16 = true;  // pairs of bfloat16, in lanes of 32 bits
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

// sum + the products of 2 bfloat16 values with 2 others, lane by lane.
inline vf add_products(vf sum, uint32_t pair, vi weights) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(pair)), (__m512bh)weights);
#else
    const vi both = vi{} + int(pair);
    return sum + (vf)(both << 16) * (vf)(weights << 16) + (vf)(both & int(0xffff0000)) * (vf)(weights & int(0xffff0000));
#endif
}

// sum + the products of 4 unsigned codes with 4 signed ones, lane by lane.
inline vi add_products(vi sum, uint32_t codes, vi weights) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(int(codes)), (__m512i)weights);
#elif defined(__AVX2__) && !defined(__AVX512F__)  // in 16 bits: sums of two products of bytes do not fit there, those of wider ones go to 32 bits
    const __m256i bytes = _mm256_set1_epi32(int(codes));
    const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(bytes, 8);
    const __m256i even_weights = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)weights, 8), 8);
    const __m256i odd_weights = _mm256_srai_epi16((__m256i)weights, 8);
    return sum + (vi)_mm256_madd_epi16(even, even_weights) + (vi)_mm256_madd_epi16(odd, odd_weights);
#else
    for (int g = 0; g < 4; g++) sum += (weights << (24 - 8 * g) >> 24) * int(codes >> (8 * g) & 255);
    return sum;
#endif
}

// The same the other way round: 4 signed codes, and unsigned ones lane by lane.
inline vi add_unsigned_products(vi sum, uint32_t codes, vi weights) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(int(codes)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i bytes = _mm256_set1_epi32(int(codes));
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
    const __m256i even_weights = _mm256_and_si256((__m256i)weights, _mm256_set1_epi16(255));
    const __m256i odd_weights = _mm256_srli_epi16((__m256i)weights, 8);
    return sum + (vi)_mm256_madd_epi16(even, even_weights) + (vi)_mm256_madd_epi16(odd, odd_weights);
#else
    for (int g = 0; g < 4; g++) sum += (vi)((vu)weights >> (8 * g) & 255) * int8_t(codes >> (8 * g));
    return sum;
#endif
}

// Pairs of `first` and `second`, one per lane, for 2 * W bfloat16 values each: first those of the first W values, then
// the rest.
inline void pairs_of(const bf16* first, const bf16* second, vi* pairs) {
#if defined(__AVX512BW__)
    const vi step = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i of_lanes = (__m512i)(step | (step + 32) << 16);  // 16-bit words: lane, and lane of the second
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    pairs[0] = (vi)_mm512_permutex2var_epi16(a, of_lanes, b);
    pairs[1] = (vi)_mm512_permutex2var_epi16(a, _mm512_add_epi16(of_lanes, _mm512_set1_epi16(16)), b);
#else
    for (int i = 0; i < 2 * W; i++) pairs[i / W][i % W] = int32_t(first[i].bits | uint32_t(second[i].bits) << 16);
#endif
}

inline vi pairs_of(vf first, vf second) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    const vi step = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i of_lanes = (__m512i)(step | (step + 16) << 16);  // 16-bit words: of the first, and of the second
    return (vi)_mm512_permutexvar_epi16(of_lanes, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    bf16 narrow[2][W];
    store(narrow[0], first);
    store(narrow[1], second);
    vi pairs;
    for (int i = 0; i < W; i++) pairs[i] = int32_t(narrow[0][i].bits | uint32_t(narrow[1][i].bits) << 16);
    return pairs;
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

inline bf16 to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline vf splat(float x) { return x - vf{}; }

// A number from memory in all lanes. Where products do not take it from there, it is read again each time: kept, it would
// take the register of a sum.
inline vf broadcast(const float* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    vf all;
    asm volatile("vbroadcastss %1, %0" : "=x"(all) : "m"(*from));
    return all;
#endif
    return splat(*from);
}

inline vf larger(vf a, vf b) { return a > b ? a : b; }
inline vf magnitude(vf a) { return (vf)((vu)a & 0x7fffffffu); }

inline vf round_whole(vf x) {  // ties to even; |x| below 2^22
#if defined(__AVX512F__)
    return (vf)_mm512_roundscale_ps((__m512)x, 0);
#endif
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds off everything after the point
    return (x + magic) - magic;
}

// 2^(whole + f) for integer `whole` and |f| ≤ 1/2, if the result is a normal number; relative error 2e-9 plus rounding.
inline vf exp2_parts(vf whole, vf f) {
    vf p = splat(1.53458116e-4f);
    p = p * f + 1.33999312e-3f;
    p = p * f + 9.61848896e-3f;
    p = p * f + 5.55032878e-2f;
    p = p * f + 2.40226469e-1f;
    p = p * f + 6.93147206e-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
#endif
    return (vf)((vu)p + ((vu)__builtin_convertvector(whole, vi) << 23));
}

// 2^x for x ≤ 0; exactly 1 at 0 and exactly 0 below -125.
inline vf exp2v(vf x) {
    vf whole = round_whole(x);
    return x < -125.0f ? vf{} : exp2_parts(whole, x - whole);
}

// 2^x for x ≤ 0, to one part in 10^4: enough for what is rounded to bfloat16.
inline vf exp2_roughly(vf x) {
#if defined(__AVX512DQ__)
    const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
    const vf p = ((f * 0.07944154f + 0.22741128f) * f + 0.69517630f) * f + 0.99992807f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return exp2v(x);
#endif
}

// e^x within the range of normal numbers, saturating outside.
inline vf expv(vf x) {
    vf inside = larger(x, splat(-87.0f));
    inside = inside > 87.0f ? splat(87.0f) : inside;
    vf whole = round_whole(inside * 1.44269504f);
    vf f = (inside * 1.44269504f - whole) + inside * 1.92596299e-8f;  // log2(e) in two pieces
    return exp2_parts(whole, f);
}

inline vf tanhv(vf x) {
    const vf square = x * x;
    const vf near = x + x * square * (-0.333333333f + square * (0.133333333f - square * 0.0539682540f));
    return magnitude(x) < 0.15f ? near : 1.0f - 2.0f / (expv(2.0f * x) + 1.0f);  // this one loses digits around 0
}

inline vf silu(vf x) { return x / (expv(-x) + 1.0f); }

// x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u)) for u = sqrt(2 / pi) (x + 0.044715 x^3).
inline vf gelu_tanh(vf x) { return x / (expv(x * (-1.5957691216057308f - 0.0713548162726f * x * x)) + 1.0f); }

// Lane indices that pair up the halves of two vectors inside segments of SEG lanes; UPPER selects which halves.
template <int SEG, bool UPPER, size_t... LANE> constexpr vi halves(std::index_sequence<LANE...>) {
    constexpr int half = SEG / 2;
    return vi{int(LANE / half / 2 * SEG + LANE % half + (LANE / half % 2 ? W : 0) + (UPPER ? half : 0))...};
}

// Transposes a matrix of W vectors: swaps halves of rows, then halves of those.
template <int SEG = W> inline void transpose(vf* v) {
    if constexpr (SEG > 1) {
        constexpr auto lanes = std::make_index_sequence<W>();
#pragma GCC unroll 16
        for (int i = 0; i < SEG / 2; i++) {
            const vf lower = __builtin_shuffle(v[i], v[i + SEG / 2], halves<SEG, false>(lanes));
            v[i + SEG / 2] = __builtin_shuffle(v[i], v[i + SEG / 2], halves<SEG, true>(lanes));
            v[i] = lower;
        }
        transpose<SEG / 2>(v);
        transpose<SEG / 2>(v + SEG / 2);
    }
}

template <int FIRST, size_t... LANE> constexpr vi in_turns(std::index_sequence<LANE...>) {
    return vi{int(FIRST + LANE / 2 + LANE % 2 * W)...};
}

// Puts a0 b0 a1 b1 … in place of a0 a1 … and b0 b1 …
inline void interleave(vf& a, vf& b) {
    constexpr auto lanes = std::make_index_sequence<W>();
    const vf lower = __builtin_shuffle(a, b, in_turns<0>(lanes));
    b = __builtin_shuffle(a, b, in_turns<W / 2>(lanes));
    a = lower;
}

template <int DISTANCE, size_t... LANE> constexpr vi partners(std::index_sequence<LANE...>) { return vi{int(LANE ^ DISTANCE)...}; }

// Reduces all lanes to one, half with half.
template <int SEG = W, class Join> inline float fold(vf v, const Join& join) {
    if constexpr (SEG == 1) {
        return v[0];
    } else {
        const vf others = __builtin_shuffle(v, partners<SEG / 2>(std::make_index_sequence<W>()));
        return fold<SEG / 2>(join(v, others), join);
    }
}

inline float sum(vf v) {
    return fold(v, [](vf a, vf b) { return a + b; });
}
inline float largest(vf v) { return fold(v, larger); }

// Writes the lanes that are not below `least`, and their places, `first` being that of the first lane. Returns how many;
// behind them anything is written, as far as all lanes would reach.
inline int put_likely(vf v, float least, int32_t first, float* values, int32_t* places) {
#if defined(__AVX512F__)
    const __mmask16 likely = _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(least), _CMP_GE_OQ);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(likely, (__m512)v));  // a compressing store is slow on some machines
    _mm512_storeu_si512(places, _mm512_maskz_compress_epi32(likely, _mm512_add_epi32(lanes, _mm512_set1_epi32(first))));
    return __builtin_popcount(likely);
#else
    int count = 0;
    for (int lane = 0; lane < W; lane++) {
        values[count] = v[lane];
        places[count] = first + lane;
        count += v[lane] >= least;
    }
    return count;
#endif
}

}  // namespace mooncake
