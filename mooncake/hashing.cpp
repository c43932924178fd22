// The chain of block keys in one call: BLAKE2s (RFC 7693), sixteen blocks' contents side by side, then one short step a
// key. The lanes are the compiler's vectors: as wide as this machine has them. mooncake/hashing.py is the definition.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16, kKeyBytes = 32, kChunkBytes = 64, kChunkWords = 16;
using Lanes = uint32_t __attribute__((vector_size(4 * kLanes)));

constexpr uint32_t kIv[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr uint32_t kParameters = 0x01010000 | kKeyBytes;  // no secret, one leaf
constexpr uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

template <class Word>
inline Word rotate(Word x, int by) {
    return (x >> by) | (x << (32 - by));
}

// Word: one hash, or kLanes of them.
template <class Word>
inline void mix(Word &a, Word &b, Word &c, Word &d, const Word &x, const Word &y) {
    a += b + x;
    d = rotate(d ^ a, 16);
    c += d;
    b = rotate(b ^ c, 12);
    a += b + y;
    d = rotate(d ^ a, 8);
    c += d;
    b = rotate(b ^ c, 7);
}

template <class Word>
void compress(Word *state, const Word *message, uint32_t bytes_so_far, bool is_last) {
    Word v[16];
    for (int i = 0; i < 8; ++i) v[i] = state[i], v[8 + i] = Word{} + kIv[i];
    v[12] ^= bytes_so_far;
    if (is_last) v[14] = ~v[14];
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        const uint8_t *s = kSigma[round];
        mix(v[0], v[4], v[8], v[12], message[s[0]], message[s[1]]);
        mix(v[1], v[5], v[9], v[13], message[s[2]], message[s[3]]);
        mix(v[2], v[6], v[10], v[14], message[s[4]], message[s[5]]);
        mix(v[3], v[7], v[11], v[15], message[s[6]], message[s[7]]);
        mix(v[0], v[5], v[10], v[15], message[s[8]], message[s[9]]);
        mix(v[1], v[6], v[11], v[12], message[s[10]], message[s[11]]);
        mix(v[2], v[7], v[8], v[13], message[s[12]], message[s[13]]);
        mix(v[3], v[4], v[9], v[14], message[s[14]], message[s[15]]);
    }
    for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[8 + i];
}

template <class Word>
void begin(Word *state) {
    for (int i = 0; i < 8; ++i) state[i] = Word{} + kIv[i];
    state[0] ^= kParameters;
}

// digests: [count, 32] bytes, of up to kLanes blocks.
void hash_contents(const unsigned char *blocks, int64_t block_bytes, int64_t count, unsigned char *digests) {
    Lanes state[8];
    begin(state);
    uint32_t words[kChunkWords][kLanes];
    for (int64_t at = 0; at < block_bytes; at += kChunkBytes) {
        const int64_t size = std::min<int64_t>(block_bytes - at, kChunkBytes);
        for (int lane = 0; lane < kLanes; ++lane) {
            uint32_t chunk[kChunkWords] = {};
            std::memcpy(chunk, blocks + std::min<int64_t>(lane, count - 1) * block_bytes + at, size_t(size));
            for (int i = 0; i < kChunkWords; ++i) words[i][lane] = chunk[i];
        }
        Lanes message[kChunkWords];
        std::memcpy(message, words, sizeof(message));
        compress(state, message, uint32_t(at + size), at + size == block_bytes);
    }
    for (int64_t lane = 0; lane < count; ++lane)
        for (int i = 0; i < 8; ++i) {
            const uint32_t word = state[i][lane];
            std::memcpy(digests + lane * kKeyBytes + 4 * i, &word, 4);
        }
}

}  // namespace

// keys: [count, 32] bytes. Each is the hash of the key before it (parent: 32 bytes) and of its block's hash.
extern "C" void extend_chain(const unsigned char *parent, const unsigned char *blocks, int64_t block_bytes,
                             int64_t count, unsigned char *keys) {
    for (int64_t i = 0; i < count; i += kLanes)
        hash_contents(blocks + i * block_bytes, block_bytes, std::min<int64_t>(count - i, kLanes), keys + i * kKeyBytes);
    uint32_t message[kChunkWords], state[8];
    std::memcpy(message, parent, kKeyBytes);
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(message + 8, keys + i * kKeyBytes, kKeyBytes);
        begin(state);
        compress(state, message, kChunkBytes, true);
        std::memcpy(keys + i * kKeyBytes, state, kKeyBytes);
        std::memcpy(message, state, kKeyBytes);
    }
}
