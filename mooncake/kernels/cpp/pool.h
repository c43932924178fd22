// Threads for the loops inside one call, and memory that a thread keeps between calls.
//
// Work is taken, not assigned: each thread takes items from its own contiguous range first and then from those of
// others. So a thread that the system does not schedule only delays its own share: nobody waits for a thread that has
// taken nothing. Idle threads spin briefly (steps of a forward pass follow each other within microseconds) and then
// sleep: threads that spin for long ruin a machine that has other work.
//
// Measured with decode steps of 30 layers on two cores, one of them wanted by another process: with an OpenMP barrier
// per product a step took 300 to 1900 ms; with this pool 1.2 to 1.9 times as long as on the idle machine.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mooncake {

// One thread's memory, kept between calls; each call divides it up anew.
class Scratch {
public:
    static constexpr int64_t LARGE_PAGE = 2 << 20;

    template <class T = float> T* start(int64_t count) {
        const int64_t bytes = (count * int64_t(sizeof(T)) + 4095) / 4096 * 4096;
        used_ = 0;
        if (bytes > capacity_) {
            // Rows of activations are pages apart: with small pages, each access would be an address lookup.
            const int64_t capacity = bytes < LARGE_PAGE ? bytes : (bytes + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
            memory_.reset();
            capacity_ = 0;
            memory_.reset((char*)std::aligned_alloc(bytes < LARGE_PAGE ? 64 : LARGE_PAGE, capacity));
            if (!memory_) throw std::bad_alloc();
            capacity_ = capacity;
            if (bytes >= LARGE_PAGE) madvise(memory_.get(), capacity_, MADV_HUGEPAGE);
        }
        return (T*)memory_.get();
    }

    template <class T = float> T* take(int64_t count) {  // from what `start` allocated; aligned to 64 bytes
        T* place = (T*)(memory_.get() + used_);
        used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return place;
    }

private:
    std::unique_ptr<char, decltype(&std::free)> memory_{nullptr, &std::free};
    int64_t capacity_ = 0, used_ = 0;
};

class Pool {
public:
    static constexpr int MAX_THREADS = 64;
    static constexpr int64_t MAX_ITEMS = 1 << 24;

    static Pool& shared() {
        static Pool* pool = new Pool;  // never destroyed: its threads may outlive main
        return *pool;
    }

    // Calls body(i) for all i in [0, items), on up to `threads` threads; returns when all are done. One loop runs at a
    // time: called from inside a loop, or while another caller has the threads, the caller does all of it. Throws
    // std::bad_alloc if a body does, on whichever thread; whatever else a body throws ends the process.
    template <class Body> void run(int64_t items, int threads, const Body& body) {
        const int team = int(std::min<int64_t>({items, threads, MAX_THREADS}));
        if (team <= 1 || items >= MAX_ITEMS || !busy_.try_lock()) {
            for (int64_t i = 0; i < items; i++) body(i);
            return;
        }
        std::lock_guard<std::mutex> held(busy_, std::adopt_lock);
        start_threads(team - 1);
        call_ = [](const void* context, int64_t i) {
            try {
                (*(const Body*)context)(i);
            } catch (const std::bad_alloc&) {
                shared().is_short_.store(true, std::memory_order_relaxed);
            }
        };
        context_ = &body;
        team_.store(team, std::memory_order_relaxed);
        left_.store(uint32_t(items), std::memory_order_relaxed);
        const uint32_t round = round_.load(std::memory_order_relaxed) + 1;
        for (int t = 0; t < team; t++)
            ranges_[t].left.store(Left{round, (t + 1) * items / team, t * items / team}.packed(), std::memory_order_release);
        round_.store(round, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) futex(&round_, FUTEX_WAKE_PRIVATE, INT_MAX);
        work(round, 0, team);
        wait_for_the_rest();
        if (is_short_.load(std::memory_order_relaxed)) {
            is_short_.store(false, std::memory_order_relaxed);
            throw std::bad_alloc();
        }
    }

private:
    static constexpr int IDLE_SPINS = 4000;  // about 60 to 100 µs
    static constexpr int WAIT_SPINS = 2000;

    // One thread's remaining items, in one word, so that a late thread can only take items of the loop whose body it
    // has read.
    struct Left {
        uint32_t round;
        int64_t end, next;

        static Left of(uint64_t word) { return {uint32_t(word >> 48), int64_t(word >> 24 & 0xffffff), int64_t(word & 0xffffff)}; }
        uint64_t packed() const { return uint64_t(round & 0xffff) << 48 | uint64_t(end) << 24 | uint64_t(next); }
    };

    struct alignas(64) Range {
        std::atomic<uint64_t> left{0};
    };

    static long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
        return syscall(SYS_futex, (uint32_t*)word, operation, value, nullptr, nullptr, 0);
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    void start_threads(int count) {
        try {
            for (; num_threads_ < count; num_threads_++) std::thread([this, id = num_threads_ + 1] { serve(id); }).detach();
        } catch (const std::exception&) {  // no thread or no memory is left: those that run take all items
        }
    }

    [[noreturn]] void serve(int id) {
        uint32_t seen = 0;
        for (;;) {
            seen = next_round(seen);
            const int team = team_.load(std::memory_order_relaxed);
            if (id < team) work(seen, id, team);
        }
    }

    uint32_t next_round(uint32_t seen) {
        for (int spin = 0; spin < IDLE_SPINS; spin++) {
            const uint32_t round = round_.load(std::memory_order_acquire);
            if (round != seen) return round;
            pause();
        }
        for (;;) {
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            if (round_.load(std::memory_order_seq_cst) == seen) futex(&round_, FUTEX_WAIT_PRIVATE, seen);
            sleepers_.fetch_sub(1, std::memory_order_relaxed);
            const uint32_t round = round_.load(std::memory_order_acquire);
            if (round != seen) return round;
        }
    }

    void work(uint32_t round, int id, int team) {
        for (int i = 0; i < team; i++) {
            std::atomic<uint64_t>& range = ranges_[(id + i) % team].left;
            uint64_t word = range.load(std::memory_order_acquire);
            for (;;) {
                Left left = Left::of(word);
                if (left.round != (round & 0xffff)) return;
                if (left.next == left.end) break;
                const Call call = call_.load(std::memory_order_relaxed);
                const void* context = context_.load(std::memory_order_relaxed);
                const int64_t item = left.next++;
                if (!range.compare_exchange_weak(word, left.packed(), std::memory_order_acq_rel)) continue;
                call(context, item);
                if (left_.fetch_sub(1, std::memory_order_seq_cst) == 1 && is_waiting_.load(std::memory_order_seq_cst))
                    futex(&left_, FUTEX_WAKE_PRIVATE, 1);
                word = range.load(std::memory_order_acquire);
            }
        }
    }

    void wait_for_the_rest() {
        for (int spin = 0; spin < WAIT_SPINS; spin++) {
            if (!left_.load(std::memory_order_acquire)) return;
            pause();
        }
        is_waiting_.store(true, std::memory_order_seq_cst);
        for (uint32_t left; (left = left_.load(std::memory_order_seq_cst));) futex(&left_, FUTEX_WAIT_PRIVATE, left);
        is_waiting_.store(false, std::memory_order_relaxed);
    }

    using Call = void (*)(const void*, int64_t);

    std::mutex busy_;
    int num_threads_ = 0;  // guarded by busy_
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int> team_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<uint32_t> left_{0};
    std::atomic<bool> is_waiting_{false};
    std::atomic<bool> is_short_{false};  // of memory, in this loop
    std::array<Range, MAX_THREADS> ranges_;
};

template <class Body> void parallel(int64_t items, int threads, const Body& body) {
    Pool::shared().run(items, threads, body);
}

}  // namespace mooncake
