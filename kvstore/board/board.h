// How a board lies in memory, and how a block is found on it: for board.cpp, which writes boards and reads them in other
// processes, and for the data plane's server, which reads the board of its own process.
//
//     head     what this is, and how much of it
//     cells    key hash and slot, open addressing; a removed one leaves a mark while others may lie beyond it
//     records  one a slot: the key itself, length, checksums, and the epoch that names the content. No epoch is ever used
//              twice, so a reader that finds the same one before and after knows that nothing changed between.
//
// A mailbox is memory between one client and the store: which slots the client has read, so that eviction knows of them,
// and which ones it may fill.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../xxh3.h"

namespace board {

constexpr uint64_t kMagic = 0x33647261'6f424b4d;  // the last digit is the version of this layout
constexpr uint32_t kMaxKeyBytes = 256;
constexpr uint32_t kMaxRanges = 94;
constexpr uint32_t kMaxTenantBytes = 128;
constexpr uint32_t kNotes = 1024, kGifts = 8;  // of a mailbox
constexpr uint32_t kMaxNameBytes = 1024;  // of key, parent and tenant, with their lengths before them
constexpr uint64_t kEmpty = 0, kRemoved = 1;
constexpr uint64_t kFirstSlot = 2;  // what a cell's low half says of slot 0

struct Head {
    uint64_t magic, incarnation, block_bytes;
    uint32_t num_slots, num_cells;
    std::atomic<uint32_t> is_closed;
    std::atomic<uint32_t> num_unlisted;  // blocks that are stored in slots, and not on the board
    uint8_t rest[4096 - 40];
};

struct Record {
    std::atomic<uint64_t> epoch;  // 0: nothing here, or just changing
    uint32_t length;
    uint16_t ranges, key_bytes;
    uint8_t key[kMaxKeyBytes];
    uint64_t sums[kMaxRanges];
};

struct Mailbox {
    std::atomic<uint64_t> written, taken;  // notes, since ever
    std::atomic<uint64_t> notes[kNotes];   // low half of the epoch, slot + 1; 0: not there yet
    std::atomic<uint64_t> given, received;  // gifts, since ever; the store writes one, the client the other
    uint64_t gifts[kGifts][2];              // slots to fill, each with its epoch

    // From any thread. Dropped when the store is behind: eviction then knows a little less. A place is taken only while it is
    // known to be free: over a note that has not been taken, another would leave a gap, and the store waits at gaps.
    void note(uint64_t slot, uint64_t epoch) {
        uint64_t place;
        do {
            const uint64_t free_until = taken.load(std::memory_order_acquire) + kNotes;
            place = written.load(std::memory_order_relaxed);
            if (place >= free_until) return;
        } while (!written.compare_exchange_weak(place, place + 1, std::memory_order_relaxed));
        notes[place % kNotes].store(epoch << 32 | (slot + 1), std::memory_order_release);
    }
};

static_assert(sizeof(Head) == 4096 && sizeof(Record) == 1024);

inline uint32_t cells_for(uint32_t num_slots) {
    uint32_t cells = 64;
    while (cells < 4 * static_cast<uint64_t>(num_slots)) cells *= 2;
    return cells;
}

// Of any keys, also chosen ones: nobody knows the seed before the store has started.
inline uint64_t hash_key(uint64_t seed, const uint8_t* key, uint32_t bytes) {
    uint64_t state = seed ^ bytes;
    for (uint32_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, key + at, bytes - at < 8 ? bytes - at : 8);
        state = xxh3::fold(state ^ word, xxh3::kPrime64_2 ^ seed) + xxh3::kPrime64_1;
    }
    return state ^ (state >> 29);
}

inline size_t board_bytes(uint32_t num_slots) {
    return sizeof(Head) + cells_for(num_slots) * sizeof(uint64_t) + num_slots * sizeof(Record);
}

// A mapped board, on either side. What says where anything lies is read once: whatever becomes of the memory later (a bit
// may flip there, in every process that looks), nobody reads or writes beside it.
struct Board {
    Head* head;
    uint32_t num_slots, num_cells;
    uint64_t incarnation, block_bytes;
    std::atomic<uint64_t>* cells;
    Record* records;

    explicit Board(void* memory)  // whose head has been checked
        : head(static_cast<Head*>(memory)),
          num_slots(head->num_slots),
          num_cells(cells_for(num_slots)),
          incarnation(head->incarnation),
          block_bytes(head->block_bytes),
          cells(reinterpret_cast<std::atomic<uint64_t>*>(head + 1)),
          records(reinterpret_cast<Record*>(cells + num_cells)) {}

    size_t bytes() const { return board_bytes(num_slots); }

    // The slot that says it holds ``key``, and its epoch; -1 when there is none.
    int64_t find(const uint8_t* key, uint32_t key_bytes, uint64_t* epoch) const {
        const uint64_t hash = hash_key(incarnation, key, key_bytes);
        const uint32_t mask = num_cells - 1;
        for (uint32_t step = 0; step <= mask; step++) {
            const uint64_t cell = cells[(hash + step) & mask].load(std::memory_order_acquire);
            if (cell == kEmpty) return -1;
            if (cell == kRemoved || (cell ^ hash) >> 32) continue;
            const uint64_t slot = (cell & 0xFFFFFFFF) - kFirstSlot;
            if (slot >= num_slots) continue;
            const Record& record = records[slot];
            *epoch = record.epoch.load(std::memory_order_acquire);
            if (*epoch && record.key_bytes == key_bytes && !memcmp(record.key, key, key_bytes) && is_still(slot, *epoch))
                return static_cast<int64_t>(slot);
        }
        return -1;
    }

    bool is_still(uint64_t slot, uint64_t epoch) const {
        std::atomic_thread_fence(std::memory_order_acquire);
        return records[slot].epoch.load(std::memory_order_relaxed) == epoch;
    }
};

// A block that came whole, with the checksums that were made of its very bytes, before anybody has heard of it.
struct Arrival {
    uint64_t slot, epoch;
    uint32_t length;
    uint16_t ranges, name_bytes;
    uint64_t sums[kMaxRanges];
    uint8_t name[kMaxNameBytes];

    const uint8_t* key() const { return name + 6; }
    uint32_t key_bytes() const { return half(0); }

    // Whether it is surely called something that a store takes.
    bool is_named() const {
        if (name_bytes < 6 || 6 + half(0) + half(1) + half(2) != name_bytes) return false;
        if (half(0) < 1 || half(0) > kMaxKeyBytes || half(1) > kMaxKeyBytes || half(2) > kMaxTenantBytes) return false;
        for (uint32_t at = name_bytes - half(2); at < name_bytes; at++)
            if (name[at] >= 0x80) return false;
        return true;
    }

  private:
    uint32_t half(int at) const { return name[2 * at] | name[2 * at + 1] << 8; }
};

enum Listing : int { kListed = 0, kKnown = 1, kUnsure = 2 };  // kKnown: it was there before. kUnsure: ask the store

// What the data plane's threads may do to the store's board by themselves; ``book`` is the store's.
using List = int (*)(void* book, std::atomic<uint64_t>* grant, const Arrival* arrival);
using Wake = void (*)(void* book);

enum Knowledge : int { kAbsent = 0, kPresent = 1, kUnknown = 2 };  // kUnknown: the store has to be asked
using Know = int (*)(void* book, const uint8_t* key, uint32_t key_bytes);

// What a record says of one block.
struct Listed {
    int64_t slot;  // -1: it is not here
    uint64_t epoch, length, ranges;
    uint64_t sums[kMaxRanges];
};

// False when what was found changed while it was being read, or cannot be.
inline bool look_up(const Board& board, const uint8_t* key, uint32_t key_bytes, Listed& listed) {
    listed.slot = board.find(key, key_bytes, &listed.epoch);
    if (listed.slot < 0) return true;
    const Record& record = board.records[listed.slot];
    listed.length = record.length;
    if (listed.length > board.block_bytes) return false;
    listed.ranges = record.ranges <= kMaxRanges ? record.ranges : 0;  // it may be changing
    memcpy(listed.sums, record.sums, listed.ranges * sizeof *listed.sums);
    return board.is_still(listed.slot, listed.epoch);
}

}  // namespace board
