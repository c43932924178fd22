// Paged attention that reads pages in place.
//
// Three methods, chosen by how many query rows (tokens times G) read the same keys, and whose rows they are:
//   few rows            `attend_dots`    of a sequence (decode, drafts, short chunks), or of a few that share a part
//   many sequences      `attend_shared`  the rows of all that share a part; on a matrix unit `attend_shared_tiles`
//   many rows (chunks)  `attend_lanes`   of one sequence; `attend_tiles` if a matrix unit takes its pages
// If the processor can, bfloat16 pages are multiplied as pairs, in tiles or in lanes; queries and weights are then
// rounded too.
//
// A context is cut into parts at multiples of DOT_PART, and parts are folded in order: where several threads compute them,
// by the one that finishes a row's last part. Within a part all methods but `attend_tiles` add up in the same order. So a
// row has the same bits whatever is computed beside it, of its own sequence or of others, and on however many threads.
#include "attention.h"

#include "attend_dots.h"
#include "attend_lanes.h"
#include "attend_shared_tiles.h"
#include "attend_tiles.h"

namespace mooncake {
namespace {

template <class T>
void attend_many(const AttentionCall& call, const CacheLayer& cache, const Item& item, const Results& results, Scratch& scratch) {
    if constexpr (!std::is_same<T, float>::value)
        if (fits_tiles<T>(call.head_dim)) return attend_tiles<T>(call, cache, item, results, scratch);
    attend_lanes<T>(call, cache, item, results, scratch);
}

// Of the rows that share a part, in as few tiles as hold them.
template <class T>
void attend_together(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, const Item& item, const Item* next,
                     const Results& results, Scratch& scratch) {
    if constexpr (!std::is_same<T, float>::value)
        if (fits_tiles<T>(call.head_dim)) {
            static_assert(SHARED_ROWS <= 3 * TILE_ROWS);
            const auto& attend = item.count > 2 * TILE_ROWS ? attend_shared_tiles<T, 3>
                                 : item.count > TILE_ROWS   ? attend_shared_tiles<T, 2>
                                                            : attend_shared_tiles<T, 1>;
            return attend(call, plan, cache, item, next, results, scratch);
        }
    attend_shared<T, SHARED_VECS>(call, plan, cache, item, next, results, scratch);
}

// Of all types of pages: what a thread keeps of one call is no other's.
uint64_t next_call() {
    static std::atomic<uint64_t> calls{0};
    return ++calls;
}

template <class T> void attend_pages(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, int threads) {
    static thread_local Scratch partial;
    static thread_local std::vector<std::atomic<int>> missing;
    if (missing.size() < plan.merges.size()) missing = std::vector<std::atomic<int>>(2 * plan.merges.size());
    for (size_t i = 0; i < plan.merges.size(); i++) missing[i].store(plan.merges[i].parts, std::memory_order_relaxed);
    const int many_shared = fits_tiles<T>(call.head_dim) ? ROWS_BESIDE_TILES : MANY_SHARED;
    const Results results{call, plan, partial.start(plan.merge_floats), missing.data(), next_call()};
    parallel(int64_t(plan.items.size()), plan.cost * call.head_dim < (1 << 16) ? 1 : threads, [&](int64_t i) {
        static thread_local Scratch scratch;
        const Item& item = plan.items[i];
        const Item* next = &item < &plan.items.back() ? &item + 1 : nullptr;
        if (item.is_shared && item.count > many_shared)
            attend_together<T>(call, plan, cache, item, next, results, scratch);
        else if (item.is_shared || call.rows(item.seq) <= plan.few_rows)
            attend_dots<T>(call, plan, cache, item, next, results, scratch);
        else
            attend_many<T>(call, cache, item, results, scratch);
    });
}

}  // namespace

void attend(const AttentionCall& call, const AttentionPlan& plan, const CacheLayer& cache, int threads) {
    with_pages(cache.kind, [&](auto page) { attend_pages<decltype(page)>(call, plan, cache, threads); });
}

}  // namespace mooncake
