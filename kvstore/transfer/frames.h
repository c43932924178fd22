// What kvstore/transfer/protocol.py packs: little-endian, without gaps.
#pragma once

#include <cstdint>
#include <vector>

#include "flow.h"

namespace {

constexpr uint16_t kWrite = 1, kRead = 2, kFetch = 4, kPut = 5, kCommit = 6, kAsk = 7;
constexpr uint16_t kOk = 0, kStaleEpoch = 1, kBadRange = 2, kNoSlot = 8, kCorrupt = 9, kHere = 11;
constexpr uint32_t kMaxRanges = 512, kMaxFrameBytes = 4 << 20;

struct __attribute__((packed)) Head {
    uint16_t operation, num_ranges;
    uint32_t payload_bytes;
    uint64_t frame_id;
};
struct __attribute__((packed)) Range {
    uint32_t block, offset, length;
    uint64_t epoch;
};
struct __attribute__((packed)) Reply {
    uint16_t status, refused;
    uint32_t payload_bytes;
    uint64_t frame_id;
    uint32_t credit_bytes;
};

struct __attribute__((packed)) Found {  // of a block that was asked for
    uint32_t length;                    // 0: it is not here
    uint16_t ranges, padding;
};

// What a frame asks for: the length of each key, then all of them.
struct Keys {
    std::vector<uint8_t> bytes;
    uint64_t num, key_bytes, start, end;  // of the key at hand

    int receive(Flow &in, const Head &head, double deadline_s) {
        num = 0, end = head.num_ranges * sizeof(uint16_t);
        bytes.resize(head.payload_bytes);
        const Part part = {bytes.data(), bytes.size(), nullptr};
        return bytes.size() < end ? kViolation : move_all<false>(in, &part, 1, deadline_s);
    }
    const uint8_t *key() const { return bytes.data() + start; }
    bool next() {
        key_bytes = bytes[2 * num] | bytes[2 * num + 1] << 8;
        ++num, start = end, end += key_bytes;
        return end <= bytes.size();
    }
    bool are_all() const { return end == bytes.size(); }
};

}  // namespace
