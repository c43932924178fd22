// Parts of memory to and from a stream socket, before a deadline, with their xxh3-64 computed while they are in cache.
// kvstore/transfer/sockets.py is the definition. Knows no frames.
#pragma once

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <cstdint>

#include "../xxh3.h"

namespace {

constexpr int kClosed = -1, kViolation = -2;  // other results: 0, or an errno
constexpr int64_t kTickUs = 1000000;          // sockets.TICK_S
constexpr uint64_t kPieceBytes = 512 << 10;   // brought into a core's L2 at a time, to be hashed and moved
constexpr int kMaxVectors = 1024;
constexpr double kLookOutS = 50e-6;

double now_s() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

struct Part {
    uint8_t *data;
    uint64_t size;
    uint64_t *sums;  // null, or one xxh3-64 for each `sum_bytes` of it and what is left
};

// Parts on their way over one socket. A call that a signal interrupts goes on where it was when it is repeated.
struct Flow {
    int64_t fd;
    int64_t tick_us;  // the socket's timeout for this direction; 0: not known
    uint64_t part, offset;
    uint64_t hashed_part, hashed_offset;  // whole blocks of the range that is being hashed, and all before it
    uint64_t lanes[8];  // of the xxh3 of that range, so far
};

void hash_until(Flow &flow, const Part *parts, uint64_t sum_bytes, uint64_t part, uint64_t offset) {
    while (flow.hashed_part < part || (flow.hashed_part == part && flow.hashed_offset < offset)) {
        const Part &at = parts[flow.hashed_part];
        const uint64_t known = flow.hashed_part < part ? at.size : offset;
        if (at.sums == nullptr) {
            if (flow.hashed_part == part) return;
            ++flow.hashed_part;
            continue;
        }
        const uint64_t start = flow.hashed_offset / sum_bytes * sum_bytes, size = std::min(sum_bytes, at.size - start);
        const uint64_t last = start + (size - 1) / xxh3::kBlock * xxh3::kBlock;
        const uint64_t until = std::min(last, start + (known - start) / xxh3::kBlock * xxh3::kBlock);
        xxh3::Lanes lanes(flow.hashed_offset > start ? flow.lanes : xxh3::kStart);
        uint8_t *next = at.data + flow.hashed_offset;
        xxh3::absorb<xxh3::Store::None>(lanes, next, next, until - flow.hashed_offset);
        lanes.read(flow.lanes);
        flow.hashed_offset = until;
        if (known < start + size) return;
        at.sums[start / sum_bytes] = xxh3::finish<xxh3::Store::None>(lanes, at.data + start, at.data + start, size);
        flow.hashed_offset = start + size;
        if (flow.hashed_offset == at.size) ++flow.hashed_part, flow.hashed_offset = 0;
    }
}

// The kernel keeps the time: a call returns after a tick, and only the last ticks before the deadline are shortened.
int arm(Flow &flow, int option, double deadline_s) {
    const double left_s = deadline_s - now_s();
    if (left_s <= 0) return ETIMEDOUT;
    int64_t tick_us = kTickUs;
    if (left_s < 1) {
        const int64_t left_us = std::max<int64_t>(1000, left_s * 1e6);
        if (flow.tick_us > 0 && flow.tick_us <= left_us && flow.tick_us >= left_us / 8) return 0;
        tick_us = std::max<int64_t>(1000, left_us / 2);
    }
    if (flow.tick_us == tick_us) return 0;
    const timeval value = {tick_us / 1000000, tick_us % 1000000};
    if (setsockopt(flow.fd, SOL_SOCKET, option, &value, sizeof value) != 0) return errno;
    flow.tick_us = tick_us;
    return 0;
}

// How much the next call of the kernel moves: all that is left, or a piece that stays in cache meanwhile.
uint64_t next_piece(const Flow &flow, const Part *parts, uint64_t num_parts) {
    constexpr uint64_t kMost = kPieceBytes + kPieceBytes / 4;
    uint64_t bytes = parts[flow.part].size - flow.offset;
    for (uint64_t part = flow.part + 1; part < num_parts && bytes <= kMost; ++part) bytes += parts[part].size;
    return bytes <= kMost ? bytes : kPieceBytes;
}

int gather(const Flow &flow, const Part *parts, uint64_t num_parts, iovec *vectors, uint64_t &bytes) {
    const uint64_t most = next_piece(flow, parts, num_parts);
    int count = 0;
    bytes = 0;
    uint64_t offset = flow.offset;
    for (uint64_t part = flow.part; bytes < most && count < kMaxVectors; ++part, offset = 0) {
        const uint64_t size = std::min(parts[part].size - offset, most - bytes);
        vectors[count++] = {parts[part].data + offset, size};
        bytes += size;
    }
    return count;
}

void advance(Flow &flow, const Part *parts, uint64_t bytes) {
    while (bytes > 0) {
        const uint64_t step = std::min(bytes, parts[flow.part].size - flow.offset);
        flow.offset += step;
        bytes -= step;
        if (flow.offset == parts[flow.part].size) ++flow.part, flow.offset = 0;
    }
}

// Lines of memory, one vector after the other.
struct Lines {
    const iovec *vector, *end;
    uint64_t offset;

    const uint8_t *next() {  // null behind the last one
        for (; vector != end; ++vector, offset = 0) {
            if (offset >= vector->iov_len) continue;
            offset += 64;
            return static_cast<const uint8_t *>(vector->iov_base) + offset - 64;
        }
        return nullptr;
    }
};

// The kernel copies half as fast again from a core's own cache as from memory, for which it does not ask ahead.
void warm(const iovec *vectors, int count) {
    constexpr int kAhead = 64;
    Lines ahead = {vectors, vectors + count, 0}, lines = ahead;
    for (int line = 0; line < kAhead; ++line) __builtin_prefetch(ahead.next());
    while (const uint8_t *line = lines.next()) {
        __builtin_prefetch(ahead.next());
        asm volatile("" : : "r"(*line));
    }
}

// What a peer nearby is about to send comes sooner than one falls asleep and is woken: so look out for it, and let others run
// meanwhile. After a wait in vain no more.
ssize_t receive(int fd, msghdr &message, bool &is_soon) {
    for (const double until_s = now_s() + kLookOutS; is_soon; is_soon = now_s() < until_s) {
        const ssize_t received = recvmsg(fd, &message, MSG_DONTWAIT);
        if (received >= 0 || errno != EAGAIN) return received;
        sched_yield();
    }
    return recvmsg(fd, &message, MSG_WAITALL);
}

template <bool kSends>
int move(Flow &flow, const Part *parts, uint64_t num_parts, uint64_t sum_bytes, double deadline_s) {
    iovec vectors[kMaxVectors];
    bool is_soon = true;
    while (flow.part < num_parts) {
        if (int error = arm(flow, kSends ? SO_SNDTIMEO : SO_RCVTIMEO, deadline_s)) return error;
        uint64_t bytes;
        msghdr message = {};
        message.msg_iov = vectors;
        message.msg_iovlen = gather(flow, parts, num_parts, vectors, bytes);
        ssize_t moved;
        if (kSends) {
            Flow ahead = flow;
            advance(ahead, parts, bytes);
            if (sum_bytes > 0)  // that warms it, too; and the checksums may be the next part
                hash_until(flow, parts, sum_bytes, ahead.part, ahead.offset);
            else
                warm(vectors, message.msg_iovlen);
            moved = sendmsg(flow.fd, &message, MSG_NOSIGNAL | (ahead.part < num_parts ? MSG_MORE : 0));
        } else {
            moved = receive(flow.fd, message, is_soon);
            if (moved == 0) return kClosed;
        }
        if (moved < 0) {
            if (errno == EAGAIN) continue;
            return errno;
        }
        advance(flow, parts, moved);
        if (!kSends) hash_until(flow, parts, sum_bytes, flow.part, flow.offset);
    }
    return 0;
}

// Moves bytes that nobody wants or that mean nothing.
template <bool kSends>
int move_nothing(Flow &flow, uint64_t bytes, double deadline_s) {
    static const uint8_t zeros[1 << 16] = {};
    uint8_t scratch[1 << 16];
    while (bytes > 0) {
        const uint64_t size = std::min<uint64_t>(bytes, sizeof scratch);
        const Part part = {kSends ? const_cast<uint8_t *>(zeros) : scratch, size, nullptr};
        flow.part = flow.offset = 0;
        if (int error = move<kSends>(flow, &part, 1, 0, deadline_s)) return error;
        bytes -= size;
    }
    return 0;
}

template <bool kSends>
int move_all(Flow &flow, const Part *parts, uint64_t num_parts, double deadline_s, uint64_t sum_bytes = 0) {
    flow.part = flow.offset = flow.hashed_part = flow.hashed_offset = 0;
    int error;
    do error = move<kSends>(flow, parts, num_parts, sum_bytes, deadline_s);
    while (error == EINTR);
    return error;
}

}  // namespace
