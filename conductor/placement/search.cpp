// The default policy's search over nodes, as policies/milliseconds.py and predict.py define it; built at first use.
// Pure arithmetic over arrays that Python owns; it keeps nothing.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../../mooncake/python_module.h"

namespace {

using python::Array;
using python::method;

constexpr double kInfinity = INFINITY;
constexpr double kSessionMs = 1e-6;    // what staying with the session's nodes is worth: it breaks ties
constexpr double kReplicaCost = 0.15;  // of computing a token: what one more replica of it costs
constexpr double kUnknown = -1.0;      // in place of milliseconds
constexpr int kMaxSources = 3;

struct Link {
    double latency, byte;
    double ms(double bytes) const { return latency + byte * bytes; }
};

struct View {
    int64_t num_prefill, num_decode, num_stores;
    const int64_t *prefill_slots, *local_store;
    const double *costs;  // [3, P]
    const uint8_t *known;
    const double *waiting_ms, *ready_at_ms, *prefill_tie_ms;
    const int64_t *decode_slots;
    const double *context_ms, *next_step_ms, *free_blocks, *decode_tie_ms;
    const int64_t *store_slots, *dram_slots;
    const double *ssd_ready_at_ms, *sending_flows, *idleness;
    const Link *links;
    const int32_t *fetch_link;  // [S, P]
    const int32_t *send_link;   // [P, D]
    const Link *least_send;
    double *scratch;  // [2 P + 2 D]
    double ssd_byte_ms, block_tokens, block_bytes, num_layers, chunk_tokens;
};

struct Request {
    const double *runs;
    const uint8_t *prefill_ok, *decode_ok;  // null: all
    double num_tokens, expected_tokens, now_ms;
    int64_t needs_decode, last_prefill, last_decode;
};

// Where a prefix beyond the prefill node's own cache comes from.
struct PrefixSource {
    int64_t store;  // -1: nowhere
    double cached, fetch_ms, prefill_ms;
    double total() const { return fetch_ms + prefill_ms; }
};

double prefill_ms(const View &v, int64_t p, double num_tokens, double cached) {
    const double fresh = num_tokens - cached;
    double step = v.costs[p], token = v.costs[v.num_prefill + p];
    if (v.chunk_tokens > 0) {
        step *= 2.0;
        token -= step / v.chunk_tokens;
        step *= std::ceil(fresh / v.chunk_tokens);
    }
    return step + fresh * (token + v.costs[2 * v.num_prefill + p] * (num_tokens + cached));
}

double queue_ms(const View &v, const Request &r, int64_t p) {
    return std::max(v.ready_at_ms[p] - r.now_ms, v.waiting_ms[p]);
}

// Of the tokens from `local` up to `cached`, of which the first `in_dram` are in the store's DRAM.
double fetch_ms(const View &v, const Request &r, int64_t p, int64_t s, double local, double cached, double in_dram) {
    double bytes = (cached - local) * v.block_bytes / v.block_tokens;
    if (s != v.local_store[p]) bytes *= v.sending_flows[s] + 1.0;
    const double fetch = v.links[v.fetch_link[s * v.num_prefill + p]].ms(bytes);
    if (cached <= in_dram) return fetch;
    const double waiting = std::max(v.ssd_ready_at_ms[s] - r.now_ms - queue_ms(v, r, p), 0.0);
    return fetch + ((cached - in_dram) * v.block_bytes / v.block_tokens * v.ssd_byte_ms + waiting);
}

double handoff_ms(double sending, double computing, double layers) {
    return std::max(sending - computing, sending / layers);
}

// The search for one request. Per prefill node, `ttft_` is first a lower bound, until `evaluate` makes it exact.
class Search {
  public:
    Search(const View &view, const Request &request)
        : v(view), r(request), usable_(r.num_tokens - 1.0), ttft_(v.scratch), computing_(ttft_ + v.num_prefill),
          work_(computing_ + v.num_prefill), bytes_(work_ + v.num_decode) {
        find_stores();
        longest_ = num_stores_ ? r.runs[v.store_slots[stores_[0]]] : 0.0;
        for (int64_t p = 0; p < v.num_prefill; ++p) longest_ = std::max(longest_, host_run(p));
    }

    PyObject *place() {
        choose_prefill();
        if (r.needs_decode) choose_pair();
        return placement();
    }

  private:
    // Up to kMaxSources stores with the longest runs, as `PlacementQuery.sources`.
    void find_stores() {
        double rank[kMaxSources];
        for (int64_t s = 0; s < v.num_stores; ++s) {
            const double run = r.runs[v.store_slots[s]];
            if (run < 1.0) continue;
            const double mine = run + v.idleness[s];
            int at = num_stores_;
            while (at > 0 && mine > rank[at - 1]) --at;
            if (at >= kMaxSources) continue;
            num_stores_ = std::min(num_stores_ + 1, kMaxSources);
            for (int i = num_stores_ - 1; i > at; --i) rank[i] = rank[i - 1], stores_[i] = stores_[i - 1];
            rank[at] = mine;
            stores_[at] = s;
        }
    }

    // Leading blocks that prefill node p has without asking another host.
    double host_run(int64_t p) const {
        const double own = r.runs[v.prefill_slots[p]];
        return v.local_store[p] < 0 ? own : std::max(own, r.runs[v.store_slots[v.local_store[p]]]);
    }

    double usable_tokens(int64_t slot) const { return std::min(r.runs[slot] * v.block_tokens, usable_); }

    PrefixSource best_source(int64_t p) const {
        const double local = usable_tokens(v.prefill_slots[p]);
        PrefixSource best{-1, local, 0.0, prefill_ms(v, p, r.num_tokens, local)};
        for (int i = -1; i < num_stores_; ++i) {
            const int64_t s = i < 0 ? v.local_store[p] : stores_[i];
            if (s < 0) continue;
            const double whole = usable_tokens(v.store_slots[s]), in_dram = usable_tokens(v.dram_slots[s]);
            if (whole <= local) continue;
            const auto up_to = [&](double cached) {
                const double fetch = fetch_ms(v, r, p, s, local, cached, in_dram);
                return PrefixSource{s, cached, fetch, prefill_ms(v, p, r.num_tokens, cached)};
            };
            if (local < in_dram && in_dram < whole && v.known[p]) {  // the only other cut that can be best: see predict.py
                const PrefixSource source = up_to(in_dram);
                if (source.total() < best.total()) best = source;
            }
            const PrefixSource source = up_to(whole);
            if (source.total() < best.total() || (!v.known[p] && source.cached > best.cached)) best = source;
        }
        return best;
    }

    void evaluate(int64_t p) {
        const PrefixSource source = best_source(p);
        ttft_[p] = queue_ms(v, r, p) + source.total() + v.prefill_tie_ms[p];
        if (p == r.last_prefill) ttft_[p] -= kSessionMs;
        ttft_[p] += kReplicaCost * v.costs[v.num_prefill + p] * ((longest_ - host_run(p)) * v.block_tokens);
        computing_[p] = source.prefill_ms;
    }

    // Most nodes are ruled out by a lower bound: the longest prefix that there is, fetched in no time. It is summed in the
    // order of `evaluate`, so that rounding does not bring a node below its bound.
    void choose_prefill() {
        const double most = std::min(longest_ * v.block_tokens, usable_);
        for (int64_t p = 0; p < v.num_prefill; ++p) {
            ttft_[p] = kInfinity;
            if (r.prefill_ok && !r.prefill_ok[p]) continue;
            ttft_[p] = queue_ms(v, r, p) + prefill_ms(v, p, r.num_tokens, most);
            computing_[p] = kUnknown;
            if (best_p_ >= 0 && p != r.last_prefill && ttft_[p] >= ttft_[best_p_]) continue;
            evaluate(p);
            if (best_p_ < 0 || ttft_[p] < ttft_[best_p_]) best_p_ = p;
        }
    }

    void choose_pair() {
        weigh_decode_nodes();
        const int64_t first = best_p_;
        try_pairs(first);
        for (int64_t p = 0; p < v.num_prefill; ++p) {
            // No pair of p is faster than with its fastest link, the fewest bytes and the idlest decode node.
            if (p == first || ttft_[p] + least_work_ >= best_ms_) continue;
            const double sending = least_bytes_ > 0.0 ? v.least_send[p].ms(least_bytes_) : 0.0;
            if (computing_[p] == kUnknown) {
                if (ttft_[p] + sending / v.num_layers + least_work_ >= best_ms_) continue;
                evaluate(p);
            }
            if (ttft_[p] + handoff_ms(sending, computing_[p], v.num_layers) + least_work_ < best_ms_) try_pairs(p);
        }
    }

    // Bytes to send to each decode node, and ms of the answer there; infinite where it must not go or has no room.
    void weigh_decode_nodes() {
        const double total_blocks = std::ceil(r.num_tokens / v.block_tokens);
        const double answer_blocks = r.expected_tokens / v.block_tokens;
        for (int pass = 0; pass < 2 && least_work_ == kInfinity; ++pass) {  // the second: no node has room, so all count
            for (int64_t d = 0; d < v.num_decode; ++d) {
                const double blocks = total_blocks - r.runs[v.decode_slots[d]];
                bytes_[d] = blocks * v.block_bytes;
                work_[d] = kInfinity;
                if (r.decode_ok && !r.decode_ok[d]) continue;
                if (pass == 0 && v.free_blocks[d] < blocks + answer_blocks) continue;
                work_[d] = (v.next_step_ms[d] + v.context_ms[d] * r.num_tokens) * r.expected_tokens + v.decode_tie_ms[d];
                if (d == r.last_decode) work_[d] -= kSessionMs;
                least_bytes_ = std::min(least_bytes_, bytes_[d]);
                least_work_ = std::min(least_work_, work_[d]);
            }
        }
    }

    void try_pairs(int64_t p) {
        const int32_t *link = v.send_link + p * v.num_decode;
        for (int64_t d = 0; d < v.num_decode; ++d) {
            const double sending = bytes_[d] > 0.0 ? v.links[link[d]].ms(bytes_[d]) : 0.0;
            const double total = ttft_[p] + handoff_ms(sending, computing_[p], v.num_layers) + work_[d];
            if (total < best_ms_) best_ms_ = total, best_p_ = p, best_d_ = d;
        }
    }

    // The fields of a `Placement`, as `NativeSearch` expects them.
    PyObject *placement() const {
        const int64_t p = best_p_, d = best_d_;
        const double local = usable_tokens(v.prefill_slots[p]);
        const PrefixSource source = best_source(p);
        double blocks = 0.0, handoff = 0.0, step = 0.0;
        if (d >= 0) {
            blocks = std::ceil(r.num_tokens / v.block_tokens) - r.runs[v.decode_slots[d]];
            const Link &link = v.links[v.send_link[p * v.num_decode + d]];
            const double sending = blocks > 0.0 ? link.ms(blocks * v.block_bytes) : 0.0;
            handoff = handoff_ms(sending, source.prefill_ms, v.num_layers);
            step = v.next_step_ms[d] + v.context_ms[d] * r.num_tokens;
        }
        // The store to read from, else the one on the prefill node's host, else any.
        int64_t pool = source.store >= 0 ? source.store : v.local_store[p];
        if (pool < 0 && v.num_stores) pool = 0;
        // If it holds more of the prompt than is to be read: how much is.
        const bool is_cut = pool >= 0 && usable_tokens(v.store_slots[pool]) > source.cached;
        const double pool_tokens = !is_cut ? -1.0 : source.store >= 0 ? source.cached : 0.0;
        const double in_dram = source.store < 0 ? source.cached : usable_tokens(v.dram_slots[source.store]);
        const auto whole = [](double value) { return static_cast<long long>(value); };
        return Py_BuildValue("LLLLLLLN(ddddd)LL", whole(p), whole(d), whole(pool), whole(local),
                             whole(source.cached - local), whole(r.num_tokens - source.cached), whole(blocks),
                             PyBool_FromLong(v.known[p]), queue_ms(v, r, p), source.fetch_ms, source.prefill_ms, handoff,
                             step, whole(pool_tokens), whole(std::max(source.cached - in_dram, 0.0)));
    }

    const View &v;
    const Request &r;
    const double usable_;  // the last token of a prompt is always computed
    double *const ttft_, *const computing_;  // [P]
    double *const work_, *const bytes_;      // [D]
    int64_t stores_[kMaxSources];
    int num_stores_ = 0;
    double longest_;  // run on any host
    double least_bytes_ = kInfinity, least_work_ = kInfinity, best_ms_ = kInfinity;
    int64_t best_p_ = -1, best_d_ = -1;
};

// On each side that is needed, some node must be allowed.
PyObject *place(const View *view, Array<const double> runs, Array<const uint8_t> prefill_ok,
                Array<const uint8_t> decode_ok, double num_tokens, double expected_tokens, double now_ms,
                int64_t needs_decode, int64_t last_prefill, int64_t last_decode) {
    const Request request{runs.data,    prefill_ok.data, decode_ok.data, num_tokens, expected_tokens,
                          now_ms,       needs_decode,    last_prefill,   last_decode};
    return Search(*view, request).place();
}

}  // namespace

PYTHON_MODULE("placement_search", method<place>("place"))
