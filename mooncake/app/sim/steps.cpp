// The longest token gaps of an answer, as steps.py defines them; built at first use. Pure arithmetic over Python's arrays.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

// `starts`, `first_ms`, `growth_ms`: [size] of the runs. Mean of the longest tenth of the gaps of steps `begin` to `end`
// (ms), which took `lived_ms` with the waiting before them.
extern "C" double tail_ms(const int64_t *starts, const double *first_ms, const double *growth_ms, int64_t size,
                          int64_t begin, int64_t end, double lived_ms) {
    static thread_local std::vector<std::tuple<double, double, int64_t>> parts;  // (longest, growth, steps)
    parts.clear();
    const int64_t gaps = end - begin;
    const int64_t stop = std::lower_bound(starts, starts + size, end) - starts;
    int64_t at = std::upper_bound(starts, starts + size, begin) - starts - 1;
    int64_t offset = begin - starts[at];
    double span = 0.0, first_step_ms = 0.0;
    for (bool waits = true; at < stop; ++at) {
        const int64_t run_end = at + 1 < stop ? starts[at + 1] : end;
        int64_t count = run_end - begin;
        const double first = first_ms[at], growth = growth_ms[at];
        const double shortest = first + growth * offset, longest = first + growth * (offset + count - 1);
        span += count * (shortest + longest) / 2;
        if (waits) {
            first_step_ms = shortest, waits = false, offset = 0;
            --count;
        }
        if (count) parts.emplace_back(longest, growth, count);
        begin = run_end;
    }
    parts.emplace_back(first_step_ms + std::max(0.0, lived_ms - span), 0.0, 1);
    std::sort(parts.begin(), parts.end(), std::greater<>());
    const int64_t wanted = (gaps + 9) / 10;
    double total = 0.0;
    int64_t left = wanted;
    for (const auto &[longest, growth, count] : parts) {
        const int64_t taken = std::min(count, left);
        total += taken * (longest - growth * (taken - 1) / 2);
        left -= taken;
        if (!left) break;
    }
    return total / wanted;
}
