// xxh3-64 (default secret, no seed) of memory, and of memory on its way from one place to another: what is hashed is what
// is stored, so a copy and its checksum cost one pass. For lengths above 240 bytes, where the algorithm has one form.
// Source: the xxHash specification, "XXH3 algorithm overview", long inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace xxh3 {

constexpr size_t kMinBytes = 241;
constexpr size_t kStripe = 64;
constexpr size_t kStripesPerBlock = 16;
constexpr size_t kBlock = kStripesPerBlock * kStripe;
constexpr size_t kPage = 4 * kBlock;
constexpr size_t kStreamBytes = 64 << 10;  // from here on stores go past the caches: nothing is read to be overwritten

alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F, kPrime64_3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63, kPrime64_5 = 0x27D4EB2F165667C5;

inline uint64_t read64(const uint8_t* p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

enum class Store { None, Cached, Streamed };  // of the bytes that are hashed

// Eight accumulators, a stripe of 64 bytes at a time; and whole lines that are stored past the caches.
#if defined(__AVX512F__)
struct Lanes {
    __m512i acc;

    explicit Lanes(const uint64_t* start) : acc(_mm512_loadu_si512(start)) {}

    template <Store store>
    void stripe(const uint8_t* in, const uint8_t* secret, uint8_t* out) {
        __m512i data = _mm512_loadu_si512(in);
        asm("" : "+v"(data));  // or it is loaded once for each use
        if constexpr (store == Store::Cached) _mm512_storeu_si512(out, data);
        const __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
        const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
        acc = _mm512_add_epi64(acc, _mm512_add_epi64(_mm512_shuffle_epi32(data, _MM_PERM_BADC), product));
    }

    void scramble(const uint8_t* secret) {
        const __m512i prime = _mm512_set1_epi64(static_cast<long long>(kPrime32_1));
        __m512i mixed = _mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47));
        mixed = _mm512_xor_si512(mixed, _mm512_loadu_si512(secret));
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
        acc = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
    }

    void read(uint64_t* to) const { _mm512_storeu_si512(to, acc); }

    static void stream(uint8_t* line, const uint8_t* from) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(line), _mm512_loadu_si512(from));
    }
};
#elif defined(__AVX2__)
struct Lanes {
    __m256i acc[2];

    explicit Lanes(const uint64_t* start) {
        for (int half = 0; half < 2; half++) acc[half] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start) + half);
    }

    template <Store store>
    void stripe(const uint8_t* in, const uint8_t* secret, uint8_t* out) {
        for (int half = 0; half < 2; half++) {
            __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in) + half);
            asm("" : "+x"(data));  // as above
            if constexpr (store == Store::Cached) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + half, data);
            const __m256i keyed =
                _mm256_xor_si256(data, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + half));
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
            acc[half] = _mm256_add_epi64(acc[half], _mm256_add_epi64(swapped, product));
        }
    }

    void scramble(const uint8_t* secret) {
        const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kPrime32_1));
        for (int half = 0; half < 2; half++) {
            __m256i mixed = _mm256_xor_si256(acc[half], _mm256_srli_epi64(acc[half], 47));
            mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + half));
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            acc[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }

    void read(uint64_t* to) const {
        for (int half = 0; half < 2; half++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + half, acc[half]);
    }

    static void stream(uint8_t* line, const uint8_t* from) {
        for (int half = 0; half < 2; half++) {
            const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(line) + half, data);
        }
    }
};
#else
struct Lanes {
    uint64_t acc[8];

    explicit Lanes(const uint64_t* start) { memcpy(acc, start, sizeof acc); }

    template <Store store>
    void stripe(const uint8_t* in, const uint8_t* secret, uint8_t* out) {
        uint64_t data[8];
        memcpy(data, in, kStripe);
        if constexpr (store == Store::Cached) memcpy(out, data, kStripe);
        for (int i = 0; i < 8; i++) {
            const uint64_t keyed = data[i] ^ read64(secret + 8 * i);
            acc[i] += data[i ^ 1] + (keyed & 0xFFFFFFFF) * (keyed >> 32);
        }
    }

    void scramble(const uint8_t* secret) {
        for (int i = 0; i < 8; i++) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(secret + 8 * i)) * kPrime32_1;
    }

    void read(uint64_t* to) const { memcpy(to, acc, sizeof acc); }

    static void stream(uint8_t* line, const uint8_t* from) { memcpy(line, from, kStripe); }
};
#endif

inline uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kStart[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

// Whole blocks, none of them the last. Sums stay in registers, whatever is stored meanwhile; and what comes a page later is
// asked for, since the processor's own prefetching ends with a page. Streamed stores fill lines of ``out``: they run ahead of
// the stripes that are hashed by what the first one is short of, and that much is written behind ``bytes``.
template <Store store>
void absorb(Lanes& given, uint8_t* out, const uint8_t* in, size_t bytes) {
    Lanes lanes = given;
    const size_t ahead = store == Store::Streamed ? -reinterpret_cast<uintptr_t>(out) % kStripe : 0;
    if constexpr (store == Store::Streamed) memcpy(out, in, ahead);
    for (size_t block = 0; block < bytes; block += kBlock) {
#pragma GCC unroll 4  // not the whole block, whose loads would all come first
        for (size_t s = 0; s < kStripesPerBlock; s++) {
            const size_t at = block + s * kStripe;
            __builtin_prefetch(in + at + kPage);
            lanes.stripe<store>(in + at, kSecret + 8 * s, out + at);
            if constexpr (store == Store::Streamed) Lanes::stream(out + at + ahead, in + at + ahead);
        }
        lanes.scramble(kSecret + 128);
    }
    given = lanes;
}

// The last block, whole or not, of ``length`` bytes that begin at ``in``; all before it has been absorbed.
template <Store store>
uint64_t finish(Lanes& lanes, uint8_t* out, const uint8_t* in, size_t length) {
    const size_t start = (length - 1) / kBlock * kBlock;
    for (size_t s = 0; s < (length - 1 - start) / kStripe; s++)
        lanes.stripe<store>(in + start + s * kStripe, kSecret + 8 * s, out + start + s * kStripe);
    // The last stripe ends with the input; it overlaps the one before, and is not aligned.
    lanes.stripe<store>(in + length - kStripe, kSecret + 121, out + length - kStripe);
    uint64_t acc[8];
    lanes.read(acc);
    uint64_t result = length * kPrime64_1;
    for (int i = 0; i < 4; i++) {
        result += fold(acc[2 * i] ^ read64(kSecret + 11 + 16 * i), acc[2 * i + 1] ^ read64(kSecret + 19 + 16 * i));
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9;
    return result ^ (result >> 32);
}

inline uint64_t hash(const uint8_t* in, size_t length) {
    Lanes lanes(kStart);
    uint8_t* const nowhere = const_cast<uint8_t*>(in);
    absorb<Store::None>(lanes, nowhere, in, (length - 1) / kBlock * kBlock);
    return finish<Store::None>(lanes, nowhere, in, length);
}

// Copies ``length`` bytes, and returns their checksum.
inline uint64_t copy(uint8_t* out, const uint8_t* in, size_t length) {
    const size_t last = (length - 1) % kBlock + 1;
    Lanes lanes(kStart);
    if (length < kStreamBytes || last < kStripe) {
        absorb<Store::Cached>(lanes, out, in, length - last);
    } else {
        absorb<Store::Streamed>(lanes, out, in, length - last);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);  // streamed stores are not ordered with what is published after them
    }
    return finish<Store::Cached>(lanes, out, in, length);
}

}  // namespace xxh3
