// Copies of what is larger than caches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace copying {

constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;  // with which the processor's own prefetching ends

#if defined(__SSE2__)
// One line past the caches, in as few stores as there can be: loads of scattered lines wait behind them.
inline void stream_line(uint8_t *out, const uint8_t *in) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)out, _mm512_loadu_si512(in));
#else
    for (int part = 0; part < kLine; part += 16)
        _mm_stream_si128((__m128i *)(out + part), _mm_loadu_si128((const __m128i *)(in + part)));
#endif
}
#endif

// As memcpy, but without reading what it overwrites. Meanwhile fetches what is a page further on: behind the end that is
// what comes `next`, which may lie anywhere. What is published afterwards has to wait for a fence.
inline void past_caches(uint8_t *out, const uint8_t *in, int64_t nbytes, const uint8_t *next) {
#if defined(__SSE2__)
    const uint8_t *end = in + nbytes;
    const int64_t before = std::min<int64_t>(nbytes, -reinterpret_cast<uintptr_t>(out) % kLine);
    memcpy(out, in, before);
    for (out += before, in += before; end - in >= kLine; in += kLine, out += kLine) {
        __builtin_prefetch(end - in > kPage ? in + kPage : next + (kPage - (end - in)));
        stream_line(out, in);
    }
    nbytes = end - in;
#endif
    memcpy(out, in, nbytes);
}

}  // namespace copying
