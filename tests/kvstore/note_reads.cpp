// Threads of one client that note what they have read, as fast as they can: for test_board.py.

#include <chrono>
#include <thread>
#include <vector>

#include "../../kvstore/board/board.h"

extern "C" void note_reads(board::Mailbox* mailbox, uint64_t slot, uint64_t epoch, int num_threads, int millis) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(millis);
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; i++)
        threads.emplace_back([=] {
            do mailbox->note(slot, epoch);
            while (std::chrono::steady_clock::now() < until);
        });
    for (std::thread& thread : threads) thread.join();
}
