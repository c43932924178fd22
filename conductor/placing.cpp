// The default policy's search over nodes, as policies/milliseconds.py and predict.py define it; built at first use.
// Pure arithmetic over arrays that Python owns; it keeps nothing.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../mooncake/python_module.h"

namespace {

using python::Array;
using python::method;

constexpr double kInfinity = INFINITY;
constexpr double kSessionMs = 1e-6;  // what staying with the session's nodes is worth: it breaks ties
constexpr double kCopyRent = 0.15;   // of computing a token: what one more copy of it costs
constexpr double kNotYet = -1.0;     // in place of milliseconds
constexpr int kMaxSources = 3;

struct Link {
    double latency, byte;
    double ms(double bytes) const { return latency + byte * bytes; }
};

struct View {
    int64_t num_prefill, num_decode, num_stores;
    const int64_t *prefill_slots, *home;
    const double *costs;  // [3, P]
    const uint8_t *known;
    const double *tail_ms, *ready_at_ms, *prefill_tie_ms;
    const int64_t *decode_slots;
    const double *context_ms, *next_step_ms, *free_blocks, *decode_tie_ms;
    const int64_t *store_slots, *dram_slots;
    const double *ssd_ready_at_ms, *sending_flows, *idleness;
    const Link *links;
    const int32_t *fetch_link;  // [S, P]
    const int32_t *send_link;   // [P, D]
    const Link *least_send;
    double *scratch;  // [3 P + 2 D]
    double ssd_byte_ms, block_tokens, block_bytes, num_layers, chunk_tokens;
};

struct Request {
    const double *runs;
    const uint8_t *prefill_ok, *decode_ok;  // null: all
    double num_tokens, expected_tokens, now_ms;
    int64_t needs_decode, last_prefill, last_decode;
};

struct Way {
    int64_t source;
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
    return std::max(v.ready_at_ms[p] - r.now_ms, v.tail_ms[p]);
}

// What lies between `local` and `cached` tokens; up to `in_dram` of them are in the store's DRAM.
double fetch_ms(const View &v, const Request &r, int64_t p, int64_t s, double local, double cached, double in_dram) {
    double bytes = (cached - local) * v.block_bytes / v.block_tokens;
    if (s != v.home[p]) bytes *= v.sending_flows[s] + 1.0;
    const double fetch = v.links[v.fetch_link[s * v.num_prefill + p]].ms(bytes);
    if (cached <= in_dram) return fetch;
    const double waiting = std::max(v.ssd_ready_at_ms[s] - r.now_ms - queue_ms(v, r, p), 0.0);
    return fetch + ((cached - in_dram) * v.block_bytes / v.block_tokens * v.ssd_byte_ms + waiting);
}

int find_sources(const View &v, const Request &r, int64_t *sources) {
    double rank[kMaxSources];
    int found = 0;
    for (int64_t s = 0; s < v.num_stores; ++s) {
        const double run = r.runs[v.store_slots[s]];
        if (run < 1.0) continue;
        const double mine = run + v.idleness[s];
        int at = found;
        while (at > 0 && mine > rank[at - 1]) --at;
        if (at >= kMaxSources) continue;
        found = std::min(found + 1, kMaxSources);
        for (int i = found - 1; i > at; --i) rank[i] = rank[i - 1], sources[i] = sources[i - 1];
        rank[at] = mine;
        sources[at] = s;
    }
    return found;
}

Way fastest_way(const View &v, const Request &r, int64_t p, double local, const int64_t *sources, int num_sources) {
    const double usable = r.num_tokens - 1.0;
    Way best{-1, local, 0.0, prefill_ms(v, p, r.num_tokens, local)};
    for (int i = -1; i < num_sources; ++i) {
        const int64_t s = i < 0 ? v.home[p] : sources[i];
        if (s < 0) continue;
        const double whole = std::min(r.runs[v.store_slots[s]] * v.block_tokens, usable);
        if (whole <= local) continue;
        const double in_dram = std::min(r.runs[v.dram_slots[s]] * v.block_tokens, usable);
        const auto way_to = [&](double cached) {
            return Way{s, cached, fetch_ms(v, r, p, s, local, cached, in_dram), prefill_ms(v, p, r.num_tokens, cached)};
        };
        if (local < in_dram && in_dram < whole && v.known[p]) {  // no other cut can be best: see predict.py
            const Way way = way_to(in_dram);
            if (way.total() < best.total()) best = way;
        }
        const Way way = way_to(whole);
        if (way.total() < best.total() || (!v.known[p] && way.cached > best.cached)) best = way;
    }
    return best;
}

// What prefill node p holds without asking another host.
double own_run(const View &v, const Request &r, int64_t p) {
    const double local = r.runs[v.prefill_slots[p]];
    return v.home[p] < 0 ? local : std::max(local, r.runs[v.store_slots[v.home[p]]]);
}

double handoff_ms(double sending, double computing, double layers) {
    return std::max(sending - computing, sending / layers);
}

// What a Placement consists of. Somebody must be allowed on each side that is needed.
PyObject *place(const View *view, Array<const double> runs, Array<const uint8_t> prefill_ok,
                Array<const uint8_t> decode_ok, double num_tokens, double expected_tokens, double now_ms,
                int64_t needs_decode, int64_t last_prefill, int64_t last_decode) {
    const View &v = *view;
    const Request r{runs.data,    prefill_ok.data, decode_ok.data, num_tokens, expected_tokens,
                    now_ms,       needs_decode,    last_prefill,   last_decode};
    const int64_t P = v.num_prefill, D = v.num_decode;
    double *ttft = v.scratch, *computing = ttft + P, *work = computing + 2 * P, *bytes = work + D;
    int64_t sources[kMaxSources];
    const int num_sources = find_sources(v, r, sources);
    const double usable = r.num_tokens - 1.0;
    double longest = num_sources ? r.runs[v.store_slots[sources[0]]] : 0.0;
    for (int64_t p = 0; p < P; ++p) longest = std::max(longest, own_run(v, r, p));
    const auto look_closely = [&](int64_t p) {
        const double local = std::min(r.runs[v.prefill_slots[p]] * v.block_tokens, usable);
        const Way way = fastest_way(v, r, p, local, sources, num_sources);
        ttft[p] = queue_ms(v, r, p) + way.total() + v.prefill_tie_ms[p];
        if (p == r.last_prefill) ttft[p] -= kSessionMs;
        ttft[p] += kCopyRent * v.costs[P + p] * ((longest - own_run(v, r, p)) * v.block_tokens);
        computing[p] = way.prefill_ms;
    };
    // Most nodes are out of the question with the longest prefix that there is, fetched in no time: until somebody looks
    // closely, ttft is this bound. It is added up as the rest is, so rounding does not bring a node below its bound.
    const double most = std::min(longest * v.block_tokens, usable);
    int64_t best_p = -1, best_d = -1;
    for (int64_t p = 0; p < P; ++p) {
        ttft[p] = kInfinity;
        if (r.prefill_ok && !r.prefill_ok[p]) continue;
        ttft[p] = queue_ms(v, r, p) + prefill_ms(v, p, r.num_tokens, most);
        computing[p] = kNotYet;
        if (best_p >= 0 && p != r.last_prefill && ttft[p] >= ttft[best_p]) continue;
        look_closely(p);
        if (best_p < 0 || ttft[p] < ttft[best_p]) best_p = p;
    }
    if (r.needs_decode) {
        const double total_blocks = std::ceil(r.num_tokens / v.block_tokens);
        const double answer_blocks = r.expected_tokens / v.block_tokens;
        double least_bytes = kInfinity, least_work = kInfinity;
        for (int pass = 0; pass < 2 && least_work == kInfinity; ++pass) {  // the second: nobody has room, so all wait
            for (int64_t d = 0; d < D; ++d) {
                const double blocks = total_blocks - r.runs[v.decode_slots[d]];
                bytes[d] = blocks * v.block_bytes;
                work[d] = kInfinity;
                if (r.decode_ok && !r.decode_ok[d]) continue;
                if (pass == 0 && v.free_blocks[d] < blocks + answer_blocks) continue;
                work[d] = (v.next_step_ms[d] + v.context_ms[d] * r.num_tokens) * r.expected_tokens + v.decode_tie_ms[d];
                if (d == r.last_decode) work[d] -= kSessionMs;
                least_bytes = std::min(least_bytes, bytes[d]);
                least_work = std::min(least_work, work[d]);
            }
        }
        double best = kInfinity;
        const auto try_row = [&](int64_t p) {
            const int32_t *link = v.send_link + p * D;
            for (int64_t d = 0; d < D; ++d) {
                const double sending = bytes[d] > 0.0 ? v.links[link[d]].ms(bytes[d]) : 0.0;
                const double total = ttft[p] + handoff_ms(sending, computing[p], v.num_layers) + work[d];
                if (total < best) best = total, best_p = p, best_d = d;
            }
        };
        const int64_t first = best_p;
        try_row(first);
        for (int64_t p = 0; p < P; ++p) {
            // No pair of p is faster than with its fastest link, the fewest bytes and the idlest decode node.
            if (p == first || ttft[p] + least_work >= best) continue;
            const double sending = least_bytes > 0.0 ? v.least_send[p].ms(least_bytes) : 0.0;
            if (computing[p] == kNotYet) {
                if (ttft[p] + sending / v.num_layers + least_work >= best) continue;
                look_closely(p);
            }
            if (ttft[p] + handoff_ms(sending, computing[p], v.num_layers) + least_work < best) try_row(p);
        }
    }
    const double local = std::min(r.runs[v.prefill_slots[best_p]] * v.block_tokens, usable);
    const Way way = fastest_way(v, r, best_p, local, sources, num_sources);
    double blocks = 0.0, handoff = 0.0, step = 0.0;
    if (best_d >= 0) {
        blocks = std::ceil(r.num_tokens / v.block_tokens) - r.runs[v.decode_slots[best_d]];
        const Link &link = v.links[v.send_link[best_p * D + best_d]];
        const double sending = blocks > 0.0 ? link.ms(blocks * v.block_bytes) : 0.0;
        handoff = handoff_ms(sending, way.prefill_ms, v.num_layers);
        step = v.next_step_ms[best_d] + v.context_ms[best_d] * r.num_tokens;
    }
    // The store to read from, else the one on the prefill node's host, else any.
    const int64_t home = v.home[best_p], pool = way.source >= 0 ? way.source : home >= 0 || !v.num_stores ? home : 0;
    // Where it holds more of the prompt than is to be used: how much of it is.
    const bool is_cut = pool >= 0 && std::min(r.runs[v.store_slots[pool]] * v.block_tokens, usable) > way.cached;
    const double pool_tokens = !is_cut ? -1.0 : way.source >= 0 ? way.cached : 0.0;
    const double in_dram = way.source < 0 ? way.cached : std::min(r.runs[v.dram_slots[way.source]] * v.block_tokens, usable);
    const auto whole = [](double value) { return static_cast<long long>(value); };
    return Py_BuildValue("LLLLLLLN(ddddd)LL", whole(best_p), whole(best_d), whole(pool), whole(local),
                         whole(way.cached - local), whole(r.num_tokens - way.cached), whole(blocks),
                         PyBool_FromLong(v.known[best_p]), queue_ms(v, r, best_p), way.fetch_ms, way.prefill_ms, handoff, step,
                         whole(pool_tokens), whole(std::max(way.cached - in_dram, 0.0)));
}

}  // namespace

PYTHON_MODULE("placing", method<place>("place"))
