// Memory that will be read after the products at hand. With many rows those wait for arithmetic and leave memory idle, so
// whoever multiplies brings some of what attention reads next into the caches.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "vectors.h"

namespace mooncake {

class Forecast {
public:
    static constexpr int LINES = 64;           // of a stretch, brought while a strip is multiplied by a part of a panel
    static constexpr int64_t STRETCH = LINES * 64;
    static constexpr int64_t MOST = 8 << 20;  // bytes: more would push each other out of the third cache

    // What will be read, at offsets from a base.
    void clear() { offsets_.clear(); }
    void add(int64_t offset, int64_t bytes) {
        for (int64_t at = 0; at < bytes && int64_t(offsets_.size()) < MOST / STRETCH; at += STRETCH) offsets_.push_back(offset + at);
    }

    void begin(const char* base) {
        base_ = base;
        next_ = 0;
    }
    void end() { next_ = int64_t(offsets_.size()); }

    // The next stretch, which no other caller gets, and its lines; there may be none.
    const char* take(int& lines) {
        const int64_t count = int64_t(offsets_.size());
        const int64_t mine = next_.load(std::memory_order_relaxed) < count ? next_.fetch_add(1, std::memory_order_relaxed) : count;
        lines = mine < count ? LINES : 0;
        return lines ? base_ + offsets_[mine] : nullptr;
    }

private:
    std::vector<int64_t> offsets_;
    const char* base_ = nullptr;
    std::atomic<int64_t> next_{0};
};

}  // namespace mooncake
