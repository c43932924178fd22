// The board: which block is in which slot of a store's DRAM, in memory that every process of the host can read.
//
// One process, the store, writes it; any number look keys up, copy blocks out of the segment beside it and check the
// copy, with no word to the store. Nothing here waits or allocates after it has been opened. ``board.h`` has the layout.
//
// In the store's process there is a *book* around the board. Its event loop changes it, and the data plane's threads list
// blocks that came whole, each in a slot that was granted for it. They do so without asking, unless the loop is just
// changing something (``board_hold``) or another writer might be at that block; the loop hears of it in a batch and
// catches up. The loop holds nothing listed for free meanwhile: a slot given for a block stays reserved until it has heard.

#include "board.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "python_module.h"  // of mooncake/

namespace {

using namespace board;

// Null also when the file is shorter: touching what it lacks would end the process.
void* map(int fd, size_t bytes, bool writable) {
    struct stat file;
    if (fstat(fd, &file) != 0 || file.st_size < 0 || static_cast<size_t>(file.st_size) < bytes) return nullptr;
    void* memory = mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_DONTDUMP);
    return memory;
}

constexpr int64_t kSureNs = 100000;
constexpr uint32_t kMaxSlots = 1 << 24;  // of a segment

// A client's: the board, its own mailbox, and the segment.
struct Reader {
    Board board;
    Mailbox* mailbox;
    uint8_t* segment;
    size_t segment_bytes;
    int sock;
    std::atomic<int64_t> is_sure_until_ns{0};  // of the monotonic clock

    // The store closes its end when it ends, however that comes. What was read of a store that ended just before is right,
    // so that it need not be looked for each time.
    bool is_alone() {
        if (board.head->is_closed.load(std::memory_order_acquire)) return true;
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        const int64_t now_ns = now.tv_sec * 1000000000 + now.tv_nsec;
        if (now_ns < is_sure_until_ns.load(std::memory_order_relaxed)) return false;
        char byte;
        const ssize_t got = recv(sock, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return true;
        is_sure_until_ns.store(now_ns + kSureNs, std::memory_order_relaxed);
        return false;
    }
};

constexpr uint64_t kInlineBytes = 4 << 20;  // at most, for a copy on the thread that asks for it
constexpr uint64_t kLockedBytes = 64 << 10;  // at most, for one under Python's lock
constexpr uint32_t kMaxArrived = 64;    // that the loop has not heard of; what comes beyond them it is asked about
constexpr uint32_t kMarks = 1 << 20;

struct Book {
    Book(void* memory, int wake_fd)
        : board(memory), wake_fd(wake_fd), expected(new(std::nothrow) uint64_t[board.num_slots]()) {}

    Board board;
    int wake_fd;      // an eventfd
    std::mutex lock;  // of the board's changes and of all that follows
    std::unique_ptr<uint64_t[]> expected;    // the epoch under which each slot was last given for a block without a name
    bool is_held = false;
    bool is_woken = false;                   // since the loop has last looked
    uint32_t patience = 1;                   // how many may come before it has to be woken
    uint16_t marks[kMarks] = {};             // how many keys that fall here are being written, or stored elsewhere
    uint32_t num_arrived = 0;
    Arrival arrived[kMaxArrived];

    uint16_t& mark(const uint8_t* key, uint32_t key_bytes) {
        return marks[hash_key(board.incarnation, key, key_bytes) % kMarks];
    }

    void wake() {
        const uint64_t one = 1;
        if (!is_woken) is_woken = write(wake_fd, &one, sizeof one) == sizeof one;
    }

    void show(uint32_t slot, uint64_t epoch, const uint8_t* key, uint32_t key_bytes, uint32_t length,
              const uint64_t* sums, uint32_t ranges) {
        Record& record = board.records[slot];
        record.epoch.store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        record.length = length;
        record.ranges = static_cast<uint16_t>(ranges);
        record.key_bytes = static_cast<uint16_t>(key_bytes);
        memcpy(record.key, key, key_bytes);
        memcpy(record.sums, sums, ranges * sizeof *sums);
        record.epoch.store(epoch, std::memory_order_release);
        const uint64_t hash = hash_key(board.incarnation, key, key_bytes);
        const uint32_t mask = board.num_cells - 1;
        for (uint32_t step = 0;; step++) {
            std::atomic<uint64_t>& cell = board.cells[(hash + step) & mask];
            if (cell.load(std::memory_order_relaxed) > kRemoved) continue;  // there are four times as many as slots
            cell.store((hash & ~0xFFFFFFFFull) | (slot + kFirstSlot), std::memory_order_release);
            return;
        }
    }
};

enum Outcome : int8_t { kRead = 0, kMissing = 1, kChanged = 2, kCorrupt = 3 };

// A block of ``least`` to ``most`` bytes; ``length`` is how many it has.
Outcome read_block(const Reader& reader, const uint8_t* key, uint32_t key_bytes, uint8_t* into, uint64_t least,
                   uint64_t most, uint64_t& length) {
    const Board& board = reader.board;
    Listed listed;
    if (!look_up(board, key, key_bytes, listed)) return kChanged;
    if (listed.slot < 0) return kMissing;
    length = listed.length;
    if (length < least || length > most || listed.ranges == 0) return kChanged;
    const uint64_t part = listed.length / listed.ranges;
    const uint8_t* from = reader.segment + static_cast<uint64_t>(listed.slot) * board.block_bytes;
    bool is_right = true;
    for (uint64_t range = 0; range < listed.ranges && is_right; range++)
        is_right = xxh3::copy(into + range * part, from + range * part, part) == listed.sums[range];
    if (!board.is_still(listed.slot, listed.epoch)) return kChanged;
    if (!is_right) return kCorrupt;
    reader.mailbox->note(listed.slot, listed.epoch);
    return kRead;
}

}  // namespace

extern "C" {

// Both sides

uint64_t board_size(uint32_t num_slots) { return board_bytes(num_slots); }
uint64_t board_mailbox_size() { return sizeof(Mailbox); }
uint64_t board_arrival_size() { return sizeof(Arrival); }
uint64_t board_max_arrived() { return kMaxArrived; }
uint64_t board_max_notes() { return kNotes; }
uint64_t board_max_gifts() { return kGifts; }
uint64_t board_max_ranges() { return kMaxRanges; }
uint64_t board_min_range_bytes() { return xxh3::kMinBytes; }

// The store's side: every call from its event loop, but for ``board_list``, ``board_know``, ``board_wake``

Book* board_create(int fd, uint32_t num_slots, uint64_t block_bytes, uint64_t incarnation, int wake_fd) {
    const size_t bytes = board_bytes(num_slots);
    void* memory = map(fd, bytes, true);
    if (!memory) return nullptr;
    auto* head = static_cast<Head*>(memory);
    head->magic = kMagic;
    head->incarnation = incarnation;
    head->block_bytes = block_bytes;
    head->num_slots = num_slots;
    head->num_cells = cells_for(num_slots);
    auto* book = new (std::nothrow) Book(memory, wake_fd);
    if (book && book->expected) return book;
    delete book;
    munmap(memory, bytes);
    return nullptr;
}

// Readers find it closed from now on.
void board_end(Book* book) { book->board.head->is_closed.store(1, std::memory_order_release); }

void board_close(Book* book) {
    munmap(book->board.head, book->board.bytes());
    delete book;
}

// Nothing happens to what is listed already. False for what a record cannot hold, or a reader not check in its one pass.
int board_show(Book* book, uint32_t slot, uint64_t epoch, const uint8_t* key, uint32_t key_bytes, uint32_t length,
               const uint64_t* sums, uint32_t ranges) {
    if (key_bytes > kMaxKeyBytes || ranges < 1 || ranges > kMaxRanges || length < xxh3::kMinBytes * ranges) return 0;
    const std::lock_guard<std::mutex> locked(book->lock);
    if (book->board.records[slot].epoch.load(std::memory_order_relaxed) == epoch) return 1;
    book->show(slot, epoch, key, key_bytes, length, sums, ranges);
    return 1;
}

void board_hide(Book* book, uint32_t slot) {
    const std::lock_guard<std::mutex> locked(book->lock);
    const Board& board = book->board;
    Record& record = board.records[slot];
    if (!record.epoch.load(std::memory_order_relaxed)) return;
    const uint32_t key_bytes = std::min<uint32_t>(record.key_bytes, kMaxKeyBytes);
    const uint64_t hash = hash_key(board.incarnation, record.key, key_bytes);
    record.epoch.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before anything is written into the slot
    const uint32_t mask = board.num_cells - 1;
    const uint64_t wanted = (hash & ~0xFFFFFFFFull) | (slot + kFirstSlot);
    uint32_t at = static_cast<uint32_t>(hash) & mask;
    for (uint32_t step = 0; board.cells[at].load(std::memory_order_relaxed) != wanted; step++) {
        if (step == mask) return;  // a bit of it has flipped: nobody finds the block by it
        at = (at + 1) & mask;
    }
    board.cells[at].store(kRemoved, std::memory_order_release);
    if (board.cells[(at + 1) & mask].load(std::memory_order_relaxed) != kEmpty) return;
    while (board.cells[at].load(std::memory_order_relaxed) == kRemoved) {  // nothing lies beyond these marks
        board.cells[at].store(kEmpty, std::memory_order_release);
        at = (at - 1) & mask;
    }
}

// Nobody lists this block without asking: somebody writes it, or has it where the board does not say. Or no longer.
void board_mark(Book* book, const uint8_t* key, uint32_t key_bytes, int is_marked) {
    const std::lock_guard<std::mutex> locked(book->lock);
    book->mark(key, key_bytes) += is_marked ? 1 : -1;
}

// Whether the data plane has to ask before it lists anything.
void board_hold(Book* book, int is_held) {
    const std::lock_guard<std::mutex> locked(book->lock);
    book->is_held = is_held;
}

// A block that nobody has named yet may come into this slot, under this epoch, which is granted next.
void board_expect(Book* book, uint32_t slot, uint64_t epoch) {
    const std::lock_guard<std::mutex> locked(book->lock);
    book->expected[slot] = epoch;
}

// So many blocks are stored, and not listed.
void board_count_unlisted(Book* book, uint32_t count) { book->board.head->num_unlisted.store(count); }

// How many blocks may come before the loop is woken: 1, unless it will look by itself.
void board_be_patient(Book* book, uint32_t patience) {
    const std::lock_guard<std::mutex> locked(book->lock);
    book->patience = patience;
    if (book->num_arrived >= patience) book->wake();
}

// What has been listed since the last call; how many.
uint32_t board_take_arrived(Book* book, Arrival* arrived) {
    const std::lock_guard<std::mutex> locked(book->lock);
    const uint32_t count = book->num_arrived;
    memcpy(arrived, book->arrived, count * sizeof *arrived);
    book->num_arrived = 0;
    book->is_woken = false;
    return count;
}

// From any thread: list a block that lies in a slot given ahead and granted to its epoch still; anybody may name any slot.
// It is readable then, and nobody may write there.
int board_list(void* opaque, std::atomic<uint64_t>* grant, const Arrival* arrival) {
    auto* book = static_cast<Book*>(opaque);
    const std::lock_guard<std::mutex> locked(book->lock);
    const uint8_t* key = arrival->key();
    uint64_t epoch;
    if (arrival->epoch == 0 || grant->load() != arrival->epoch) return kUnsure;
    if (book->expected[arrival->slot] != arrival->epoch) return kUnsure;
    if (book->board.find(key, arrival->key_bytes(), &epoch) >= 0) return kKnown;
    if (book->is_held || book->num_arrived == kMaxArrived || book->mark(key, arrival->key_bytes())) return kUnsure;
    grant->store(0);
    book->show(static_cast<uint32_t>(arrival->slot), arrival->epoch, key, arrival->key_bytes(), arrival->length,
               arrival->sums, arrival->ranges);
    book->arrived[book->num_arrived++] = *arrival;
    if (book->num_arrived >= book->patience) book->wake();
    return kListed;
}

// From any thread: whether a block is stored. Somebody may write it, or have it where the board does not say.
int board_know(void* opaque, const uint8_t* key, uint32_t key_bytes) {
    auto* book = static_cast<Book*>(opaque);
    if (key_bytes < 1 || key_bytes > kMaxKeyBytes) return kUnknown;
    const std::lock_guard<std::mutex> locked(book->lock);
    uint64_t epoch;
    if (book->board.find(key, key_bytes, &epoch) >= 0) return kPresent;
    return book->mark(key, key_bytes) ? kUnknown : kAbsent;
}

// From any thread: somebody waits for a slot.
void board_wake(void* opaque) {
    auto* book = static_cast<Book*>(opaque);
    const std::lock_guard<std::mutex> locked(book->lock);
    book->wake();
}

Mailbox* board_open_mailbox(int fd) { return static_cast<Mailbox*>(map(fd, sizeof(Mailbox), true)); }
void board_close_mailbox(Mailbox* mailbox) { munmap(mailbox, sizeof(Mailbox)); }

// The slots that the mailbox's client has read and that hold the same content still; returns how many, at most ``room``.
uint32_t board_take_notes(const Book* book, Mailbox* mailbox, uint32_t* slots, uint32_t room) {
    const Board* board = &book->board;
    uint64_t at = mailbox->taken.load(std::memory_order_relaxed);
    uint32_t count = 0;
    for (uint32_t seen = 0; seen < kNotes && count < room; seen++) {
        const uint64_t note = mailbox->notes[at % kNotes].exchange(0, std::memory_order_acquire);
        if (!note) break;
        at++;
        const uint64_t slot = (note & 0xFFFFFFFF) - 1;
        if (slot >= board->num_slots) continue;
        const uint64_t epoch = board->records[slot].epoch.load(std::memory_order_relaxed);
        if (epoch && (epoch & 0xFFFFFFFF) == note >> 32) slots[count++] = static_cast<uint32_t>(slot);
    }
    mailbox->taken.store(at, std::memory_order_release);
    return count;
}

// A slot for the mailbox's client to fill, whatever the client may have written there. False when there is no room for it.
int board_give(Mailbox* mailbox, uint64_t slot, uint64_t epoch) {
    const uint64_t at = mailbox->given.load(std::memory_order_relaxed);
    if (at - mailbox->received.load(std::memory_order_acquire) >= kGifts) return 0;
    mailbox->gifts[at % kGifts][0] = slot;
    mailbox->gifts[at % kGifts][1] = epoch;
    mailbox->given.store(at + 1, std::memory_order_release);
    return 1;
}

// A client's side: from any thread, but for ``board_receive``

// Whether everything that is in slots is listed.
int board_lists_all(const Reader* reader) { return reader->board.head->num_unlisted.load() == 0; }

// Null when this is not a board as we know it, or there is no address space. Takes nothing over: close the files.
Reader* board_open(int board_fd, int mailbox_fd, int segment_fd, int sock) {
    auto* head = static_cast<Head*>(map(board_fd, sizeof(Head), false));
    if (!head) return nullptr;
    const uint32_t num_slots = head->num_slots;
    const uint64_t block_bytes = head->block_bytes;
    const bool is_known = head->magic == kMagic && num_slots <= kMaxSlots && head->num_cells == cells_for(num_slots);
    munmap(head, sizeof(Head));
    if (!is_known) return nullptr;  // and its numbers may be any
    const size_t bytes = board_bytes(num_slots), segment_bytes = num_slots * block_bytes;
    void* memory = map(board_fd, bytes, false);
    void* mailbox = map(mailbox_fd, sizeof(Mailbox), true);
    void* segment = map(segment_fd, segment_bytes, true);
    if (!memory || !mailbox || !segment) {
        if (memory) munmap(memory, bytes);
        if (mailbox) munmap(mailbox, sizeof(Mailbox));
        if (segment) munmap(segment, segment_bytes);
        return nullptr;
    }
    madvise(segment, segment_bytes, MADV_HUGEPAGE);
    const Board board(memory);
    if (board.num_slots != num_slots || board.block_bytes != block_bytes) {  // it has just changed
        munmap(memory, bytes);
        munmap(mailbox, sizeof(Mailbox));
        munmap(segment, segment_bytes);
        return nullptr;
    }
    return new (std::nothrow) Reader{board, static_cast<Mailbox*>(mailbox), static_cast<uint8_t*>(segment),
                                     segment_bytes, sock};
}

uint8_t* board_segment(const Reader* reader) { return reader->segment; }
uint64_t board_segment_bytes(const Reader* reader) { return reader->segment_bytes; }

void board_leave(Reader* reader) {
    munmap(reader->board.head, reader->board.bytes());
    munmap(reader->mailbox, sizeof(Mailbox));
    munmap(reader->segment, reader->segment_bytes);
    delete reader;
}

// The next slot that the store has given us, with its epoch. False when there is none, or no such slot.
int board_receive(Reader* reader, uint64_t* slot_and_epoch) {
    Mailbox* mailbox = reader->mailbox;
    const uint64_t at = mailbox->received.load(std::memory_order_relaxed);
    if (at == mailbox->given.load(std::memory_order_acquire)) return 0;
    memcpy(slot_and_epoch, mailbox->gifts[at % kGifts], sizeof mailbox->gifts[0]);
    mailbox->received.store(at + 1, std::memory_order_release);
    return slot_and_epoch[0] < reader->board.num_slots;
}

uint64_t board_block_bytes(const Reader* reader) { return reader->board.block_bytes; }

// Copies a block into a slot that its caller holds, and gives the checksum of each of its equal ranges.
void board_write(const Reader* reader, uint32_t slot, const uint8_t* from, uint64_t length, uint32_t ranges,
                 uint64_t* sums) {
    uint8_t* into = reader->segment + slot * reader->board.block_bytes;
    const uint64_t part = length / ranges;
    for (uint64_t range = 0; range < ranges; range++)
        sums[range] = xxh3::copy(into + range * part, from + range * part, part);
}

// ``keys`` one after the other, ``ends`` where each one ends. How many are here, and for each whether it is; -1 when the
// store is gone.
int32_t board_exists(Reader* reader, const uint8_t* keys, const uint32_t* ends, uint32_t count, uint8_t* here) {
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
    const uint64_t length = reader->board.records[slot].length;
    return length <= reader->board.block_bytes && reader->board.is_still(slot, epoch) ? static_cast<int64_t>(length) : -1;
}

// Copies one block of ``expected`` bytes and checks the copy. An ``Outcome``; -1 when the store is gone.
int32_t board_read(Reader* reader, const uint8_t* key, uint32_t key_bytes, uint8_t* into, uint64_t expected) {
    uint64_t length;
    const Outcome outcome = read_block(*reader, key, key_bytes, into, expected, expected, length);
    return reader->is_alone() ? -1 : outcome;
}

}  // extern "C"

namespace {

// Copies one block into memory of Python's, if it is short and fits, and checks the copy. Its length; None when it is not to be
// had so, for whatever reason.
PyObject* get(Reader* reader, PyObject* key, PyObject* into) {
    constexpr int kWritable = 1;
    char* name;
    ssize_t name_bytes;
    Py_buffer room;
    if (PyBytes_AsStringAndSize(key, &name, &name_bytes) != 0) return nullptr;
    if (PyObject_GetBuffer(into, &room, kWritable) != 0) return PyErr_Clear(), python::none();
    const uint64_t most = std::min<uint64_t>(room.size, kInlineBytes);
    uint64_t length;
    bool is_read;
    {
        const python::Unlocked unlocked(most > kLockedBytes);
        is_read = read_block(*reader, reinterpret_cast<const uint8_t*>(name), name_bytes, static_cast<uint8_t*>(room.data), 1,
                             most, length) == kRead && !reader->is_alone();
    }
    PyBuffer_Release(&room);
    return is_read ? PyLong_FromLongLong(length) : python::none();
}

}  // namespace

PYTHON_MODULE("board", python::method<get>("get"))
