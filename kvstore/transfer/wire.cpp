// The data plane's bytes without Python: parts of memory to and from a stream socket with their xxh3-64 computed while
// they are in cache, and the owner's answers to reads and writes, of ranges and of whole blocks by key.
// kvstore/transfer/protocol.py, sockets.py and server.py are the definition; what is left goes back to them.
// Sending without a copy (splice, sendfile) was slower on loopback: the receiver copied from cold memory, page by page.
//
// A block that is fetched by key is found on the board of the store in this process and sent from where it lies, under no
// lease: it may leave its slot on the way. The checksums went ahead of it, so whoever receives it finds that out, and asks
// again with a lease. A block that is put lands in a slot that the store has given out ahead, and is held against the
// checksums that its sender made; one that is committed was written there by a client of this host, into a slot of its
// own. Both are listed on the board from here, and Python is asked only when the board does not know.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../board/board.h"
#include "../copy.h"
#include "flow.h"
#include "frames.h"

namespace {

constexpr int kLanded = -3;  // what `serve` tells Python of a block that the store has to decide about,
constexpr int kOther = -4;   // and `exchange` of a reply
constexpr uint64_t kMaxAnswerBytes = 256 << 20;  // of the blocks that one frame may fetch
constexpr uint32_t kMaxAhead = 64;
constexpr double kFrameTimeoutS = 30;
constexpr double kSlotPatienceS = 0.01;  // how long a block waits for a slot, which the store has been asked for
constexpr timespec kSlotPoll = {0, 50000};

struct Slot {
    uint64_t block, epoch;
};

struct Owner {
    uint8_t *segment;
    std::atomic<uint64_t> *grants;
    uint64_t block_bytes, num_blocks;
    std::atomic<uint64_t> credit_bytes;  // of each connection
    void *board;                         // of the store, or null
    board::Mailbox *mailbox;             // where we note what has been read
    void *book;                          // of the store, or null: then nothing can be put
    board::List list;
    board::Wake wake;
    board::Know know;
    std::atomic<uint64_t> is_locked;  // for what follows
    uint64_t num_ahead;               // slots for blocks that will be put
    Slot ahead[kMaxAhead];
};

class Locked {
  public:
    explicit Locked(Owner &owner) : flag(owner.is_locked) {
        while (flag.exchange(1, std::memory_order_acquire)) sched_yield();
    }
    ~Locked() { flag.store(0, std::memory_order_release); }

  private:
    std::atomic<uint64_t> &flag;
};

bool take_slot(Owner &owner, Slot &slot) {
    const Locked locked(owner);
    if (owner.num_ahead == 0) return false;
    slot = owner.ahead[--owner.num_ahead];
    return true;
}

bool give_slot(Owner &owner, const Slot &slot) {
    const Locked locked(owner);
    if (owner.num_ahead == kMaxAhead) return false;
    owner.ahead[owner.num_ahead++] = slot;
    return true;
}

// One thread writes it; others read the counts and what is landing.
struct Connection {
    Head head;
    Range first;
    uint32_t padding;
    int64_t fd;
    std::atomic<uint64_t> bytes_in, bytes_out, refused;
    std::atomic<uint64_t> num_landing;  // ranges of the frame that is being received,
    std::atomic<uint32_t> landing[kMaxRanges];  // and their blocks
    board::Arrival arrival;                     // what is being put or committed
};

// Where the frame is about to land is made known before the grants are read, and `revoke` changes the grants before it
// reads what is landing: one of the two sees the other.
uint16_t begin_landing(const Owner &owner, Connection &connection, const Range *ranges, uint16_t &refused) {
    const uint16_t count = connection.head.num_ranges;
    for (uint16_t i = 0; i < count; ++i) connection.landing[i].store(ranges[i].block, std::memory_order_relaxed);
    connection.num_landing.store(count);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (refused = 0; refused < count; ++refused) {
        const Range &range = ranges[refused];
        if (range.epoch == 0 || owner.grants[range.block].load() != range.epoch) {
            connection.num_landing.store(0);
            return kStaleEpoch;
        }
    }
    refused = 0;
    return kOk;
}

// Waits for ever for the first byte, then until the deadline, which it sets, for the rest.
int receive_head(Flow &flow, Connection &connection, double &deadline_s) {
    uint8_t *at = reinterpret_cast<uint8_t *>(&connection.head);
    constexpr uint64_t kSize = sizeof(Head) + sizeof(Range);
    ssize_t received;
    do received = recv(flow.fd, at, kSize, MSG_WAITALL);
    while (received < 0 && (errno == EAGAIN || errno == EINTR));
    if (received <= 0) return received == 0 ? kClosed : errno;
    deadline_s = now_s() + kFrameTimeoutS;
    const Part rest = {at + received, kSize - received, nullptr};
    return rest.size ? move_all<false>(flow, &rest, 1, deadline_s) : 0;
}

int serve_frame(const Owner &owner, Connection &connection, Flow &in, Flow &out, double deadline_s) {
    const Head head = connection.head;
    Range ranges[kMaxRanges];
    Part parts[1 + kMaxRanges];
    ranges[0] = connection.first;
    if (head.num_ranges > 1) {
        const Part rest = {reinterpret_cast<uint8_t *>(ranges + 1), (head.num_ranges - 1) * sizeof(Range), nullptr};
        if (int error = move_all<false>(in, &rest, 1, deadline_s)) return error;
    }
    uint64_t bytes = 0, num_parts = 1;  // the first is the reply
    uint16_t status = kOk, refused = 0;
    for (uint16_t i = 0; i < head.num_ranges; ++i) {
        const Range &range = ranges[i];
        if (range.length == 0) return kViolation;
        bytes += range.length;
        const bool is_inside =
            range.block < owner.num_blocks && (uint64_t)range.offset + range.length <= owner.block_bytes;
        if (!is_inside && status == kOk) status = kBadRange, refused = i;
        uint8_t *at = owner.segment + range.block * owner.block_bytes + range.offset;
        if (is_inside && num_parts > 1 && parts[num_parts - 1].data + parts[num_parts - 1].size == at)
            parts[num_parts - 1].size += range.length;
        else if (is_inside)
            parts[num_parts++] = {at, range.length, nullptr};
    }
    if (bytes != head.payload_bytes) return kViolation;

    const bool writes = head.operation == kWrite;
    if (writes) {
        if (status == kOk) status = begin_landing(owner, connection, ranges, refused);
        int error;
        if (status == kOk) {
            error = move_all<false>(in, parts + 1, num_parts - 1, deadline_s);
            connection.num_landing.store(0);
            if (!error) connection.bytes_in += bytes;
        } else {
            error = move_nothing<false>(in, bytes, deadline_s);
        }
        if (error) return error;
    }
    if (status != kOk) ++connection.refused;
    Reply reply = {status, refused, writes ? 0 : head.payload_bytes, head.frame_id,
                   (uint32_t)owner.credit_bytes.load(std::memory_order_relaxed)};
    parts[0] = {reinterpret_cast<uint8_t *>(&reply), sizeof reply, nullptr};
    const bool sends_range = !writes && status == kOk;
    if (int error = move_all<true>(out, parts, sends_range ? num_parts : 1, deadline_s)) return error;
    if (writes) return 0;
    if (sends_range) return connection.bytes_out += bytes, 0;
    return move_nothing<true>(out, bytes, deadline_s);
}

int send_reply(const Owner &owner, const Connection &connection, Flow &out, uint16_t status, double deadline_s) {
    Reply reply = {status, 0, 0, connection.head.frame_id,
                   (uint32_t)owner.credit_bytes.load(std::memory_order_relaxed)};
    const Part part = {reinterpret_cast<uint8_t *>(&reply), sizeof reply, nullptr};
    return move_all<true>(out, &part, 1, deadline_s);
}

// Blocks by key: a Found for each, then each one's checksums and bytes.
int serve_fetch(const Owner &owner, Connection &connection, Flow &in, Flow &out, double deadline_s) {
    const Head head = connection.head;
    Keys keys;
    if (int error = keys.receive(in, head, deadline_s)) return error;

    const board::Board board(owner.board);
    std::vector<board::Listed> listed(head.num_ranges);
    Found found[kMaxRanges] = {};
    uint64_t bytes = 0;
    for (uint16_t i = 0; i < head.num_ranges; ++i) {
        board::Listed &block = listed[i];
        if (!keys.next()) return kViolation;
        const bool is_sure = board::look_up(board, keys.key(), keys.key_bytes, block);
        if (!is_sure || (block.slot >= 0 && bytes + block.length > kMaxAnswerBytes)) block.slot = -1;
        if (block.slot < 0) continue;
        found[i] = {(uint32_t)block.length, (uint16_t)block.ranges, 0};
        bytes += block.length;
    }
    if (!keys.are_all()) return kViolation;

    Reply reply = {kOk, 0, (uint32_t)(head.num_ranges * sizeof(Found)), head.frame_id,
                   (uint32_t)owner.credit_bytes.load(std::memory_order_relaxed)};
    std::vector<Part> parts = {{reinterpret_cast<uint8_t *>(&reply), sizeof reply, nullptr},
                               {reinterpret_cast<uint8_t *>(found), reply.payload_bytes, nullptr}};
    for (board::Listed &block : listed) {
        if (block.slot < 0) continue;
        parts.push_back({reinterpret_cast<uint8_t *>(block.sums), block.ranges * sizeof(uint64_t), nullptr});
        parts.push_back({owner.segment + block.slot * owner.block_bytes, block.length, nullptr});
    }
    if (int error = move_all<true>(out, parts.data(), parts.size(), deadline_s)) return error;
    connection.bytes_out += bytes;
    for (const board::Listed &block : listed)
        if (block.slot >= 0) owner.mailbox->note(block.slot, block.epoch);
    return 0;
}

// Whether blocks are stored: a byte for each, a `Knowledge`.
int serve_ask(const Owner &owner, Connection &connection, Flow &in, Flow &out, double deadline_s) {
    const Head head = connection.head;
    Keys keys;
    if (int error = keys.receive(in, head, deadline_s)) return error;

    uint8_t known[kMaxRanges];
    for (uint16_t i = 0; i < head.num_ranges; ++i) {
        if (!keys.next()) return kViolation;
        known[i] = owner.know(owner.book, keys.key(), keys.key_bytes);
    }
    if (!keys.are_all()) return kViolation;
    Reply reply = {kOk, 0, head.num_ranges, head.frame_id, (uint32_t)owner.credit_bytes.load(std::memory_order_relaxed)};
    const Part parts[] = {{reinterpret_cast<uint8_t *>(&reply), sizeof reply, nullptr}, {known, head.num_ranges, nullptr}};
    return move_all<true>(out, parts, 2, deadline_s);
}

// A slot of ours to land in, in `connection.arrival`. Those that have been revoked meanwhile are the store's again.
bool begin_put(Owner &owner, Connection &connection) {
    board::Arrival &arrival = connection.arrival;
    const double until_s = now_s() + kSlotPatienceS;
    for (bool is_told = false;; nanosleep(&kSlotPoll, nullptr)) {
        Slot slot;
        while (take_slot(owner, slot)) {
            const Range range = {(uint32_t)slot.block, 0, arrival.length, slot.epoch};
            uint16_t refused;
            if (begin_landing(owner, connection, &range, refused) != kOk) continue;
            arrival.slot = slot.block, arrival.epoch = slot.epoch;
            return true;
        }
        if (!is_told) owner.wake(owner.book), is_told = true;
        if (now_s() >= until_s) return false;
    }
}

board::Listing list(Owner &owner, const board::Arrival &arrival) {
    if (!arrival.is_named()) return board::kUnsure;
    const int listing = owner.list(owner.book, &owner.grants[arrival.slot], &arrival);
    if (listing == board::kKnown) {  // which is a use of it
        uint64_t epoch;
        const int64_t slot = board::Board(owner.board).find(arrival.key(), arrival.key_bytes(), &epoch);
        if (slot >= 0) owner.mailbox->note(slot, epoch);
    }
    return static_cast<board::Listing>(listing);
}

// What a frame says of a block that a board can list.
bool is_listable(const Owner &owner, const Connection &connection, uint64_t ranges, uint64_t name_bytes) {
    const uint64_t length = connection.first.length;
    return connection.head.num_ranges == 1 && ranges >= 1 && ranges <= board::kMaxRanges && name_bytes >= 1 &&
           name_bytes <= board::kMaxNameBytes && length >= 1 && length % ranges == 0 &&
           length / ranges >= xxh3::kMinBytes && length <= owner.block_bytes;
}

// One block with its name, then the checksums of its equal ranges. What the first range of the frame says: how many ranges,
// bytes of the name, bytes of the block. `kLanded`: it is where `connection.arrival` says, and Python is to answer.
int serve_put(Owner &owner, Connection &connection, Flow &in, Flow &out, double deadline_s) {
    const uint64_t ranges = connection.first.block, name_bytes = connection.first.offset;
    const uint64_t length = connection.first.length, sums_bytes = ranges * sizeof(uint64_t);
    if (!is_listable(owner, connection, ranges, name_bytes)) return kViolation;
    if (name_bytes + length + sums_bytes != connection.head.payload_bytes) return kViolation;
    board::Arrival &arrival = connection.arrival;
    arrival.length = length, arrival.ranges = ranges, arrival.name_bytes = name_bytes;
    const Part name = {arrival.name, name_bytes, nullptr};
    if (int error = move_all<false>(in, &name, 1, deadline_s)) return error;
    if (!begin_put(owner, connection)) {
        if (int error = move_nothing<false>(in, length + sums_bytes, deadline_s)) return error;
        ++connection.refused;
        return send_reply(owner, connection, out, kNoSlot, deadline_s);
    }
    uint64_t theirs[board::kMaxRanges];
    const Part parts[] = {{owner.segment + arrival.slot * owner.block_bytes, length, arrival.sums},
                          {reinterpret_cast<uint8_t *>(theirs), sums_bytes, nullptr}};
    const int error = move_all<false>(in, parts, 2, deadline_s, length / ranges);
    const bool is_right = !error && !memcmp(theirs, arrival.sums, sums_bytes);
    const board::Listing listing = is_right ? list(owner, arrival) : board::kKnown;
    connection.num_landing.store(0);
    if (listing == board::kKnown) give_slot(owner, {arrival.slot, arrival.epoch});
    if (error) return error;
    if (is_right) connection.bytes_in += length;
    if (listing == board::kUnsure) return kLanded;
    return send_reply(owner, connection, out, is_right ? kOk : kCorrupt, deadline_s);
}

// A block that a client of this host has written into a slot of its own: its name and its checksums. The first range of the
// frame says where it is, and bytes of the name in place of an offset. `kHere`: it was here, and the slot stays the client's.
int serve_commit(Owner &owner, Connection &connection, Flow &in, Flow &out, double deadline_s) {
    const Range first = connection.first;
    const uint64_t sums_bytes = connection.head.payload_bytes - first.offset, ranges = sums_bytes / sizeof(uint64_t);
    if (first.block >= owner.num_blocks || first.offset > connection.head.payload_bytes) return kViolation;
    if (sums_bytes % sizeof(uint64_t) || !is_listable(owner, connection, ranges, first.offset)) return kViolation;
    board::Arrival &arrival = connection.arrival;
    arrival.slot = first.block, arrival.epoch = first.epoch, arrival.length = first.length;
    arrival.ranges = ranges, arrival.name_bytes = first.offset;
    const Part parts[] = {{arrival.name, first.offset, nullptr},
                          {reinterpret_cast<uint8_t *>(arrival.sums), sums_bytes, nullptr}};
    if (int error = move_all<false>(in, parts, 2, deadline_s)) return error;
    const board::Listing listing = list(owner, arrival);
    if (listing == board::kUnsure) return kLanded;
    return send_reply(owner, connection, out, listing == board::kListed ? kOk : kHere, deadline_s);
}

// One message there and one back. A call that a signal or a deadline ended goes on where it was when it is repeated.
struct Exchange {
    Flow in, out;
    uint64_t step;  // of the call that is under way
};

// The client's end of a connection for slices, when only one is on its way, and that of one piece,
struct Sliced : Exchange {
    Head head;
    Range range;
    uint32_t padding;
    Part piece;
    uint64_t sum_bytes;
    double deadline_s;
    Reply reply;
};

// and of one for blocks by key.
struct Keyed : Exchange {
    uint64_t is_right;  // whether the block that was received is what its checksums say
    uint64_t made[board::kMaxRanges], listed[board::kMaxRanges];
    uint8_t answer[sizeof(Reply) + kMaxRanges * sizeof(Found)];
};

template <bool kSends>
int go_on(Exchange &at, uint64_t step, const Part *parts, uint64_t num_parts, uint64_t sum_bytes, double deadline_s) {
    if (at.step > step) return 0;
    Flow &flow = kSends ? at.out : at.in;
    if (at.step < step) {
        flow.part = flow.offset = flow.hashed_part = flow.hashed_offset = 0;
        at.step = step;
    }
    const int error = move<kSends>(flow, parts, num_parts, sum_bytes, deadline_s);
    if (!error) at.step = step + 1;
    return error;
}

}  // namespace

extern "C" {

int send_parts(Flow *flow, const Part *parts, uint64_t num_parts, uint64_t sum_bytes, double deadline_s) {
    return move<true>(*flow, parts, num_parts, sum_bytes, deadline_s);
}

int receive_parts(Flow *flow, const Part *parts, uint64_t num_parts, uint64_t sum_bytes, double deadline_s) {
    return move<false>(*flow, parts, num_parts, sum_bytes, deadline_s);
}

// A slice and its reply. `kOther`: it is not that all went well.
int exchange(Sliced *at) {
    const bool is_read = at->head.operation == kRead;
    const Part out[] = {{reinterpret_cast<uint8_t *>(&at->head), sizeof(Head) + sizeof(Range), nullptr}, at->piece};
    const Part back[] = {{reinterpret_cast<uint8_t *>(&at->reply), sizeof(Reply), nullptr}, at->piece};
    if (int error = go_on<true>(*at, 1, out, is_read ? 1 : 2, at->sum_bytes, at->deadline_s)) return error;
    if (int error = go_on<false>(*at, 3, back, is_read ? 2 : 1, at->sum_bytes, at->deadline_s)) return error;
    at->step = 0;
    const Reply &reply = at->reply;
    const bool is_well = reply.status == kOk && reply.frame_id == at->head.frame_id &&
                         reply.payload_bytes == (is_read ? at->head.payload_bytes : 0);
    return is_well ? 0 : kOther;
}

// A request, and the answer to it.
int keyed_ask(Keyed *keyed, uint8_t *request, uint64_t request_bytes, uint64_t answer_bytes, double deadline_s) {
    const Part out = {request, request_bytes, nullptr}, back = {keyed->answer, answer_bytes, nullptr};
    if (int error = go_on<true>(*keyed, 1, &out, 1, 0, deadline_s)) return error;
    if (int error = go_on<false>(*keyed, 3, &back, 1, 0, deadline_s)) return error;
    return keyed->step = 0;
}

// The next block of the answer, behind its checksums.
int keyed_receive(Keyed *keyed, uint8_t *into, uint64_t length, uint64_t ranges, double deadline_s) {
    const uint64_t sums_bytes = ranges * sizeof(uint64_t);
    const Part parts[] = {{reinterpret_cast<uint8_t *>(keyed->listed), sums_bytes, nullptr}, {into, length, keyed->made}};
    if (int error = go_on<false>(*keyed, 1, parts, 2, length / ranges, deadline_s)) return error;
    keyed->is_right = !memcmp(keyed->listed, keyed->made, sums_bytes);
    return keyed->step = 0;
}

// One block, asked for and received when it has at most `room` bytes. `length`: how many it has, 0 when it is not here.
int keyed_get(Keyed *keyed, uint8_t *request, uint64_t request_bytes, uint8_t *into, uint64_t room, uint64_t *length,
              double deadline_s) {
    struct __attribute__((packed)) Answer {
        Reply reply;
        Found found;
    };
    const Part out = {request, request_bytes, nullptr}, back = {keyed->answer, sizeof(Answer), nullptr};
    if (int error = go_on<true>(*keyed, 1, &out, 1, 0, deadline_s)) return error;
    if (int error = go_on<false>(*keyed, 3, &back, 1, 0, deadline_s)) return error;
    const auto &[reply, found] = *reinterpret_cast<const Answer *>(keyed->answer);
    const uint64_t frame_id = reinterpret_cast<const Head *>(request)->frame_id;
    if (reply.status != kOk || reply.frame_id != frame_id || reply.payload_bytes != sizeof(Found)) return kViolation;
    *length = found.length;
    if (found.length > 0 && found.length <= room) {
        const uint64_t ranges = found.ranges, sums_bytes = ranges * sizeof(uint64_t);
        if (ranges < 1 || ranges > board::kMaxRanges || found.length % ranges) return kViolation;
        if (found.length / ranges < xxh3::kMinBytes) return kViolation;
        const Part parts[] = {{reinterpret_cast<uint8_t *>(keyed->listed), sums_bytes, nullptr},
                              {into, found.length, keyed->made}};
        if (int error = go_on<false>(*keyed, 5, parts, 2, found.length / ranges, deadline_s)) return error;
        keyed->is_right = !memcmp(keyed->listed, keyed->made, sums_bytes);
    }
    return keyed->step = 0;
}

// A block with its head before it and its checksums behind it, and the answer.
int keyed_put(Keyed *keyed, uint8_t *head, uint64_t head_bytes, uint8_t *data, uint64_t length, uint64_t ranges,
              double deadline_s) {
    const Part parts[] = {{head, head_bytes, nullptr},
                          {data, length, keyed->made},
                          {reinterpret_cast<uint8_t *>(keyed->made), ranges * sizeof(uint64_t), nullptr}};
    const Part back = {keyed->answer, sizeof(Reply), nullptr};
    if (int error = go_on<true>(*keyed, 1, parts, 3, length / ranges, deadline_s)) return error;
    if (int error = go_on<false>(*keyed, 3, &back, 1, 0, deadline_s)) return error;
    return keyed->step = 0;
}

// Answers until the connection ends, or until a frame begins that is not ours to answer: its head, with the first range, then
// is in `connection`, and the result 0. Or a block has come (`kLanded`) that the store has to decide about.
int serve(Owner *owner, Connection *connection) {
    Flow in = {}, out = {};
    in.fd = out.fd = connection->fd;
    while (true) {
        double deadline_s = 0;
        if (int error = receive_head(in, *connection, deadline_s)) return error;
        const Head &head = connection->head;
        int result;
        if (head.num_ranges < 1 || head.num_ranges > kMaxRanges || head.payload_bytes < 1) return 0;
        if (head.operation == kPut && owner->book) {
            result = serve_put(*owner, *connection, in, out, deadline_s);
        } else if (head.payload_bytes > kMaxFrameBytes) {
            return 0;
        } else if (head.operation == kCommit && owner->book) {
            result = serve_commit(*owner, *connection, in, out, deadline_s);
        } else if (head.operation == kAsk && owner->book) {
            result = serve_ask(*owner, *connection, in, out, deadline_s);
        } else if (head.operation == kWrite || head.operation == kRead) {
            result = serve_frame(*owner, *connection, in, out, deadline_s);
        } else if (head.operation == kFetch && owner->board) {
            result = serve_fetch(*owner, *connection, in, out, deadline_s);
        } else {
            return 0;
        }
        if (result) return result;
    }
}

int give_ahead(Owner *owner, uint64_t block, uint64_t epoch) { return give_slot(*owner, {block, epoch}); }
int take_ahead(Owner *owner, uint64_t *slot_and_epoch) { return take_slot(*owner, *reinterpret_cast<Slot *>(slot_and_epoch)); }

// Of the memory that native.py and native_owner.py describe, too.
uint64_t sliced_size() { return sizeof(Sliced); }
uint64_t keyed_size() { return sizeof(Keyed); }
uint64_t owner_size() { return sizeof(Owner); }
uint64_t connection_size() { return sizeof(Connection); }

void copy(uint8_t *out, const uint8_t *in, uint64_t nbytes) {
    copying::past_caches(out, in, static_cast<int64_t>(nbytes), in);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
}
