// The board: which block is in which slot of a store's DRAM, in memory that every process of the host can read.
//
// One process, the store, writes it; any number look keys up, copy blocks out of the segment beside it and check the
// copy, with no word to the store. Nothing here waits or allocates after it has been opened.
//
//     head     what this is, and how much of it
//     cells    key hash and slot, open addressing; a removed one leaves a mark while others may lie beyond it
//     records  one a slot: the key itself, length, checksums, and the epoch that names the content. No epoch is ever used
//              twice, so a reader that finds the same one before and after knows that nothing changed between.
//
// A lane is one client's memory, which the client writes: which slots it has read, so that eviction knows of them.

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <sys/socket.h>

#include "xxh3.h"

namespace {

constexpr uint64_t kMagic = 0x31647261'6f424b4d;  // the last digit is the version of this layout
constexpr uint32_t kMaxKeyBytes = 256;
constexpr uint32_t kMaxRanges = 94;
constexpr uint32_t kNotes = 1024;  // of a lane
constexpr uint64_t kEmpty = 0, kRemoved = 1;
constexpr uint64_t kFirstSlot = 2;  // what a cell's low half says of slot 0

struct Head {
    uint64_t magic, incarnation, block_bytes;
    uint32_t num_slots, num_cells;
    std::atomic<uint32_t> is_closed;
    uint8_t rest[4096 - 36];
};

struct Record {
    std::atomic<uint64_t> epoch;  // 0: nothing here, or just changing
    uint32_t length;
    uint16_t ranges, key_bytes;
    uint8_t key[kMaxKeyBytes];
    uint64_t sums[kMaxRanges];
};

struct Lane {
    std::atomic<uint64_t> written, taken;  // notes, since ever
    std::atomic<uint64_t> notes[kNotes];   // low half of the epoch, slot + 1; 0: not there yet
};

static_assert(sizeof(Head) == 4096 && sizeof(Record) == 1024);

uint32_t cells_for(uint32_t num_slots) {
    uint32_t cells = 64;
    while (cells < 4 * static_cast<uint64_t>(num_slots)) cells *= 2;
    return cells;
}

// Of any keys, also chosen ones: nobody knows the seed before the store has started.
uint64_t hash_key(uint64_t seed, const uint8_t* key, uint32_t bytes) {
    uint64_t state = seed ^ bytes;
    for (uint32_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, key + at, bytes - at < 8 ? bytes - at : 8);
        state = xxh3::fold(state ^ word, xxh3::kPrime64_2 ^ seed) + xxh3::kPrime64_1;
    }
    return state ^ (state >> 29);
}

// A mapped board, on either side.
struct Board {
    Head* head;
    std::atomic<uint64_t>* cells;
    Record* records;
    size_t bytes;

    Board(void* memory, uint32_t num_cells, size_t size) : bytes(size) {
        head = static_cast<Head*>(memory);
        cells = reinterpret_cast<std::atomic<uint64_t>*>(head + 1);
        records = reinterpret_cast<Record*>(cells + num_cells);
    }

    // The slot that says it holds ``key``, and its epoch; -1 when there is none.
    int64_t find(const uint8_t* key, uint32_t key_bytes, uint64_t* epoch) const {
        const uint64_t hash = hash_key(head->incarnation, key, key_bytes);
        const uint32_t mask = head->num_cells - 1;
        for (uint32_t step = 0; step <= mask; step++) {
            const uint64_t cell = cells[(hash + step) & mask].load(std::memory_order_acquire);
            if (cell == kEmpty) return -1;
            if (cell == kRemoved || (cell ^ hash) >> 32) continue;
            const uint64_t slot = (cell & 0xFFFFFFFF) - kFirstSlot;
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

size_t board_bytes(uint32_t num_slots) {
    return sizeof(Head) + cells_for(num_slots) * sizeof(uint64_t) + num_slots * sizeof(Record);
}

void* map(int fd, size_t bytes, bool writable) {
    void* memory = mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_DONTDUMP);
    return memory;
}

// A client's: the board, its own lane, and the segment.
struct Reader {
    Board board;
    Lane* lane;
    uint8_t* segment;
    size_t segment_bytes;
    int sock;

    // The store closes its end when it ends, however that comes.
    bool is_alone() const {
        char byte;
        if (board.head->is_closed.load(std::memory_order_acquire)) return true;
        const ssize_t got = recv(sock, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    }

    // Dropped when the store is behind: eviction then knows a little less.
    void note(uint64_t slot, uint64_t epoch) const {
        const uint64_t at = lane->written.load(std::memory_order_relaxed);
        if (at - lane->taken.load(std::memory_order_relaxed) >= kNotes) return;
        const uint64_t place = lane->written.fetch_add(1, std::memory_order_relaxed);
        lane->notes[place % kNotes].store(epoch << 32 | (slot + 1), std::memory_order_release);
    }
};

enum Outcome : int8_t { kRead = 0, kMissing = 1, kChanged = 2, kCorrupt = 3 };

Outcome read_block(const Reader& reader, const uint8_t* key, uint32_t key_bytes, uint8_t* into,
                   uint64_t expected) {
    const Board& board = reader.board;
    uint64_t epoch;
    const int64_t slot = board.find(key, key_bytes, &epoch);
    if (slot < 0) return kMissing;
    const Record& record = board.records[slot];
    const uint64_t bytes = record.length, ranges = record.ranges;
    uint64_t sums[kMaxRanges];
    memcpy(sums, record.sums, sizeof sums);
    if (!board.is_still(slot, epoch) || bytes != expected) return kChanged;
    const uint64_t part = bytes / ranges;
    const uint8_t* from = reader.segment + static_cast<uint64_t>(slot) * board.head->block_bytes;
    bool is_right = true;
    for (uint64_t range = 0; range < ranges && is_right; range++)
        is_right = xxh3::copy(into + range * part, from + range * part, part) == sums[range];
    if (!board.is_still(slot, epoch)) return kChanged;
    if (!is_right) return kCorrupt;
    reader.note(slot, epoch);
    return kRead;
}

}  // namespace

extern "C" {

// Both sides

uint64_t board_size(uint32_t num_slots) { return board_bytes(num_slots); }
uint64_t board_lane_size() { return sizeof(Lane); }
uint64_t board_max_ranges() { return kMaxRanges; }
uint64_t board_min_range_bytes() { return xxh3::kMinBytes; }

// The store's side: every call from one thread

Board* board_create(int fd, uint32_t num_slots, uint64_t block_bytes, uint64_t incarnation) {
    const size_t bytes = board_bytes(num_slots);
    void* memory = map(fd, bytes, true);
    if (!memory) return nullptr;
    auto* head = static_cast<Head*>(memory);
    head->magic = kMagic;
    head->incarnation = incarnation;
    head->block_bytes = block_bytes;
    head->num_slots = num_slots;
    head->num_cells = cells_for(num_slots);
    return new (std::nothrow) Board(memory, head->num_cells, bytes);
}

void board_close(Board* board) {
    board->head->is_closed.store(1, std::memory_order_release);
    munmap(board->head, board->bytes);
    delete board;
}

void board_show(Board* board, uint32_t slot, uint64_t epoch, const uint8_t* key, uint32_t key_bytes, uint32_t length,
                const uint64_t* sums, uint32_t ranges) {
    Record& record = board->records[slot];
    record.epoch.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    record.length = length;
    record.ranges = static_cast<uint16_t>(ranges);
    record.key_bytes = static_cast<uint16_t>(key_bytes);
    memcpy(record.key, key, key_bytes);
    memcpy(record.sums, sums, ranges * sizeof *sums);
    record.epoch.store(epoch, std::memory_order_release);
    const uint64_t hash = hash_key(board->head->incarnation, key, key_bytes);
    const uint32_t mask = board->head->num_cells - 1;
    for (uint32_t step = 0;; step++) {
        std::atomic<uint64_t>& cell = board->cells[(hash + step) & mask];
        if (cell.load(std::memory_order_relaxed) > kRemoved) continue;  // there are four times as many cells as slots
        cell.store((hash & ~0xFFFFFFFFull) | (slot + kFirstSlot), std::memory_order_release);
        return;
    }
}

void board_hide(Board* board, uint32_t slot) {
    Record& record = board->records[slot];
    if (!record.epoch.load(std::memory_order_relaxed)) return;
    const uint64_t hash = hash_key(board->head->incarnation, record.key, record.key_bytes);
    record.epoch.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before anything is written into the slot
    const uint32_t mask = board->head->num_cells - 1;
    const uint64_t wanted = (hash & ~0xFFFFFFFFull) | (slot + kFirstSlot);
    uint32_t at = static_cast<uint32_t>(hash) & mask;
    while (board->cells[at].load(std::memory_order_relaxed) != wanted) at = (at + 1) & mask;
    board->cells[at].store(kRemoved, std::memory_order_release);
    if (board->cells[(at + 1) & mask].load(std::memory_order_relaxed) != kEmpty) return;
    while (board->cells[at].load(std::memory_order_relaxed) == kRemoved) {  // nothing lies beyond these marks
        board->cells[at].store(kEmpty, std::memory_order_release);
        at = (at - 1) & mask;
    }
}

Lane* board_open_lane(int fd) { return static_cast<Lane*>(map(fd, sizeof(Lane), true)); }
void board_close_lane(Lane* lane) { munmap(lane, sizeof(Lane)); }

// The slots that the lane's client has read and that hold the same content still; returns how many, at most ``room``.
uint32_t board_take_notes(const Board* board, Lane* lane, uint32_t* slots, uint32_t room) {
    uint64_t at = lane->taken.load(std::memory_order_relaxed);
    uint32_t count = 0;
    for (uint32_t seen = 0; seen < kNotes && count < room; seen++) {
        const uint64_t note = lane->notes[at % kNotes].exchange(0, std::memory_order_acquire);
        if (!note) break;
        at++;
        const uint64_t slot = (note & 0xFFFFFFFF) - 1;
        if (slot >= board->head->num_slots) continue;
        const uint64_t epoch = board->records[slot].epoch.load(std::memory_order_relaxed);
        if (epoch && (epoch & 0xFFFFFFFF) == note >> 32) slots[count++] = static_cast<uint32_t>(slot);
    }
    lane->taken.store(at, std::memory_order_release);
    return count;
}

// A client's side: from any thread

// Null when this is not a board as we know it, or there is no address space. Takes nothing over: close the files.
Reader* board_open(int board_fd, int lane_fd, int segment_fd, int sock) {
    auto* head = static_cast<Head*>(map(board_fd, sizeof(Head), false));
    if (!head) return nullptr;
    const bool is_known = head->magic == kMagic && head->num_cells == cells_for(head->num_slots);
    const uint32_t num_slots = head->num_slots, num_cells = head->num_cells;
    const size_t bytes = board_bytes(num_slots), segment_bytes = num_slots * head->block_bytes;
    munmap(head, sizeof(Head));
    if (!is_known) return nullptr;
    void* memory = map(board_fd, bytes, false);
    void* lane = map(lane_fd, sizeof(Lane), true);
    void* segment = map(segment_fd, segment_bytes, true);
    if (!memory || !lane || !segment) {
        if (memory) munmap(memory, bytes);
        if (lane) munmap(lane, sizeof(Lane));
        if (segment) munmap(segment, segment_bytes);
        return nullptr;
    }
    madvise(segment, segment_bytes, MADV_HUGEPAGE);
    return new (std::nothrow) Reader{Board(memory, num_cells, bytes), static_cast<Lane*>(lane),
                                     static_cast<uint8_t*>(segment), segment_bytes, sock};
}

void board_leave(Reader* reader) {
    munmap(reader->board.head, reader->board.bytes);
    munmap(reader->lane, sizeof(Lane));
    munmap(reader->segment, reader->segment_bytes);
    delete reader;
}

uint64_t board_block_bytes(const Reader* reader) { return reader->board.head->block_bytes; }

// Copies a block into a slot that its caller holds, and gives the checksum of each of its equal ranges.
void board_write(const Reader* reader, uint32_t slot, const uint8_t* from, uint64_t length, uint32_t ranges,
                 uint64_t* sums) {
    uint8_t* into = reader->segment + slot * reader->board.head->block_bytes;
    const uint64_t part = length / ranges;
    for (uint64_t range = 0; range < ranges; range++)
        sums[range] = xxh3::copy(into + range * part, from + range * part, part);
}

// ``keys`` one after the other, ``ends`` where each one ends. How many are here, and for each whether it is; -1 when the
// store is gone.
int32_t board_exists(const Reader* reader, const uint8_t* keys, const uint32_t* ends, uint32_t count, uint8_t* here) {
    int32_t found = 0;
    uint64_t epoch;
    for (uint32_t i = 0, start = 0; i < count; start = ends[i++]) {
        here[i] = reader->board.find(keys + start, ends[i] - start, &epoch) >= 0;
        found += here[i];
    }
    return reader->is_alone() ? -1 : found;
}

// The length of one block; -1 when it is not here.
int64_t board_length(const Reader* reader, const uint8_t* key, uint32_t key_bytes) {
    uint64_t epoch;
    const int64_t slot = reader->board.find(key, key_bytes, &epoch);
    if (slot < 0) return -1;
    const int64_t length = reader->board.records[slot].length;
    return reader->board.is_still(slot, epoch) ? length : -1;
}

// Copies one block of ``expected`` bytes and checks the copy. An ``Outcome``; -1 when the store is gone.
int32_t board_read(const Reader* reader, const uint8_t* key, uint32_t key_bytes, uint8_t* into,
                   uint64_t expected) {
    const Outcome outcome = read_block(*reader, key, key_bytes, into, expected);
    return reader->is_alone() ? -1 : outcome;
}

}  // extern "C"
