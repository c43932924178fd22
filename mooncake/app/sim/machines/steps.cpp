// The longest token gaps of an answer, as steps.py defines them; built at first use. Pure arithmetic over Python's arrays.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "../../python_module.h"

namespace {

using python::Array;
using python::method;

// Mean of the longest tenth of the gaps of steps `begin` to `end` (ms), which took `lived_ms` with the waiting before them.
double tail_ms(Array<const int64_t> starts, Array<const double> first_ms, Array<const double> growth_ms, int64_t begin,
               int64_t end, double lived_ms) {
    static thread_local std::vector<std::tuple<double, double, int64_t>> parts;  // (longest, growth, steps)
    parts.clear();
    const int64_t gaps = end - begin;
    const int64_t *const first_start = starts.data, *const last_start = starts.data + starts.size;
    const int64_t stop = std::lower_bound(first_start, last_start, end) - first_start;
    int64_t at = std::upper_bound(first_start, last_start, begin) - first_start - 1;
    int64_t offset = begin - starts.data[at];
    double span = 0.0, first_step_ms = 0.0;
    for (bool waits = true; at < stop; ++at) {
        const int64_t run_end = at + 1 < stop ? starts.data[at + 1] : end;
        int64_t count = run_end - begin;
        const double first = first_ms.data[at], growth = growth_ms.data[at];
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

}  // namespace

PYTHON_MODULE("steps", method<tail_ms>("tail_ms"))
