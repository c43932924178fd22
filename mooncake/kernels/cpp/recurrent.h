// A short convolution, and the gated delta rule or a state space (Mamba-2) behind one, over states in pages (recurrent.py
// defines them).
//
// Columns of a matrix do not depend on each other, so a thread takes a strip of them through all tokens of a sequence,
// in its own cache, one token at a time: a token gets the same bits in any batch and chunk.
#pragma once

#include <cmath>
#include <vector>

#include "steps.h"

namespace mooncake {

// Mirrored in cpu_library.py. Channels and sizes of value heads are multiples of 16, and for the delta rule those of key heads.
struct RecurrentCall {
    const float* inputs;  // [T][channels]
    const float *decay, *beta;  // [T][heads]; of a state space: decay, step
    const float* taps;  // [num_taps][channels]
    const float *bias, *skip;  // of a state space [channels], [heads]; null: the delta rule
    float* states;  // of a page: [num_taps - 1][channels], then [heads][key_dim][value_dim]
    int64_t num_pages, page_stride;  // in floats
    const int64_t *starts, *sources, *targets;  // of the runs
    int64_t num_runs;
    float* mixed;  // [T][channels], what comes out of the convolution
    float* output;  // [T][heads][value_dim]
    int32_t channels, num_taps, num_key_heads, heads, key_dim, value_dim;  // no heads: the convolution alone

    bool has_delta() const { return !skip; }
    int64_t tail() const { return int64_t(num_taps - 1) * channels; }
    float* page(int64_t number) const { return states + number * page_stride; }
    bool continues(int64_t run) const { return run > 0 && sources[run] == targets[run - 1]; }
};

inline int check_runs(const RecurrentCall& call) {
    for (int64_t r = 0; r < call.num_runs; r++) {
        if (call.sources[r] < -1 || call.sources[r] >= call.num_pages) return BAD_BLOCK;
        if (call.targets[r] < 0 || call.targets[r] >= call.num_pages) return BAD_BLOCK;
    }
    return OK;
}

inline void normalise_head(float* head, int size, float scale) {
    vf squares{};
    for (int i = 0; i < size; i += W) squares += load(head + i) * load(head + i);
    const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
    for (int i = 0; i < size; i += W) store(head + i, load(head + i) * factor);
}

// Convolution, activation and norms of token `t`, in a sequence whose tokens here begin at `origin`, after `before`
// (its inputs before that; null: none).
inline void mix_token(const RecurrentCall& call, int64_t t, int64_t origin, const float* before) {
    const int last = call.num_taps - 1;
    float* to = call.mixed + t * call.channels;
    for (int c = 0; c < call.channels; c += W) {
        vf total = call.bias ? load(call.bias + c) : vf{};
        for (int tap = 0; tap <= last; tap++) {
            const int64_t at = t - last + tap;
            if (at < origin && !before) continue;
            const float* row = at >= origin ? call.inputs + at * call.channels : before + (last + at - origin) * call.channels;
            total += load(row + c) * load(call.taps + tap * call.channels + c);
        }
        store(to + c, call.heads ? silu(total) : total);
    }
    for (int h = 0; call.has_delta() && h < 2 * call.num_key_heads; h++)
        normalise_head(to + h * call.key_dim, call.key_dim, h < call.num_key_heads ? 1.0f / std::sqrt(float(call.key_dim)) : 1.0f);
}

// A strip of columns of a head's matrix through one token, whose key, query and values are given.
template <int N>
void take_delta(float* strip, int key_dim, const float* key, const float* query, const float* value, float left, float beta,
                float* to) {
    vf known[N]{}, error[N], out[N]{};
    for (int i = 0; i < key_dim; i++)
        for (int n = 0; n < N; n++) {
            const vf kept = load(strip + (i * N + n) * W) * left;
            store(strip + (i * N + n) * W, kept);
            known[n] += kept * key[i];
        }
    for (int n = 0; n < N; n++) error[n] = (load(value + n * W) - known[n]) * beta;
    for (int i = 0; i < key_dim; i++)
        for (int n = 0; n < N; n++) {
            const vf now = load(strip + (i * N + n) * W) + error[n] * key[i];
            store(strip + (i * N + n) * W, now);
            out[n] += now * query[i];
        }
    for (int n = 0; n < N; n++) store(to + n * W, out[n]);
}

template <int N>
void take_state_space(float* strip, int key_dim, const float* key, const float* query, const float* value, float left,
                      float step, float skip, float* to) {
    vf entering[N], out[N]{};
    for (int n = 0; n < N; n++) entering[n] = load(value + n * W) * step;
    for (int i = 0; i < key_dim; i++)
        for (int n = 0; n < N; n++) {
            const vf now = load(strip + (i * N + n) * W) * left + entering[n] * key[i];
            store(strip + (i * N + n) * W, now);
            out[n] += now * query[i];
        }
    for (int n = 0; n < N; n++) store(to + n * W, out[n] + load(value + n * W) * skip);
}

// That strip through the runs of a sequence, first ≤ run < end.
template <int STRIP> void take_strip(const RecurrentCall& call, int64_t first, int64_t end, int head, int column, float* strip) {
    constexpr int N = STRIP / W;
    const int key_dim = call.key_dim, of_keys = call.num_key_heads * key_dim, of_values = call.heads * call.value_dim;
    const bool has_delta = call.has_delta();  // queries, keys, values; otherwise values, keys, queries
    const int queries_at = has_delta ? 0 : of_values + of_keys, keys_at = has_delta ? of_keys : of_values;
    const int values_at = has_delta ? 2 * of_keys : 0;
    const int64_t place = call.tail() + int64_t(head) * key_dim * call.value_dim + column;
    const int key_head = head / (call.heads / call.num_key_heads);
    if (call.sources[first] < 0) std::memset(strip, 0, sizeof(float) * key_dim * STRIP);
    else
        for (int i = 0; i < key_dim; i++)
            std::memcpy(strip + i * STRIP, call.page(call.sources[first]) + place + int64_t(i) * call.value_dim, sizeof(float) * STRIP);
    for (int64_t run = first; run < end; run++) {
        for (int64_t t = call.starts[run]; t < call.starts[run + 1]; t++) {
            const float* row = call.mixed + t * call.channels;
            const float *key = row + keys_at + key_head * key_dim, *query = row + queries_at + key_head * key_dim;
            const float* value = row + values_at + head * call.value_dim + column;
            const float left = std::exp(call.decay[t * call.heads + head]), beta = call.beta[t * call.heads + head];
            float* to = call.output + (t * call.heads + head) * call.value_dim + column;
            if (call.has_delta()) take_delta<N>(strip, key_dim, key, query, value, left, beta, to);
            else take_state_space<N>(strip, key_dim, key, query, value, left, beta, call.skip[head], to);
        }
        for (int i = 0; i < key_dim; i++)
            std::memcpy(call.page(call.targets[run]) + place + int64_t(i) * call.value_dim, strip + i * STRIP, sizeof(float) * STRIP);
    }
}

// The last inputs of the convolution after a run; a page may be read and written.
inline void keep_inputs(const RecurrentCall& call, int64_t run) {
    const int rows = call.num_taps - 1;
    const int64_t end = call.starts[run + 1], count = end - call.starts[run], bytes = call.channels * int64_t(sizeof(float));
    const float* from = call.sources[run] < 0 ? nullptr : call.page(call.sources[run]);
    float* to = call.page(call.targets[run]);
    for (int row = 0; row < rows; row++) {
        float* place = to + int64_t(row) * call.channels;
        if (row + count >= rows) std::memcpy(place, call.inputs + (end - rows + row) * call.channels, bytes);
        else if (from) std::memmove(place, from + (row + count) * call.channels, bytes);
        else std::memset(place, 0, bytes);
    }
}

inline void recur(const RecurrentCall& call, int threads) {
    std::vector<int64_t> firsts;  // runs with which sequences begin
    for (int64_t run = 0; run < call.num_runs; run++)
        if (!call.continues(run)) firsts.push_back(run);
    const int64_t sequences = int64_t(firsts.size()), tokens = call.starts[call.num_runs];
    firsts.push_back(call.num_runs);
    std::vector<int64_t> owners(tokens);
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t t = call.starts[firsts[s]]; t < call.starts[firsts[s + 1]]; t++) owners[t] = s;
    parallel(tokens, tokens * call.channels < (1 << 13) ? 1 : threads, [&](int64_t t) {
        const int64_t run = firsts[owners[t]], source = call.sources[run];
        mix_token(call, t, call.starts[run], source < 0 ? nullptr : call.page(source));
    });
    if (call.heads) {
        const int width = call.value_dim % 32 ? 16 : 32, strips = call.heads * (call.value_dim / width);
        parallel(sequences * strips, tokens * strips < 16 ? 1 : threads, [&](int64_t item) {
            static thread_local Scratch memory;
            float* strip = memory.start(int64_t(call.key_dim) * width);
            const int64_t s = item / strips, at = item % strips * width;
            const int head = int(at / call.value_dim), column = int(at % call.value_dim);
            if (width == 32) take_strip<32>(call, firsts[s], firsts[s + 1], head, column, strip);
            else take_strip<16>(call, firsts[s], firsts[s + 1], head, column, strip);
        });
    }
    for (int64_t run = 0; run < call.num_runs; run++) keep_inputs(call, run);
}

}  // namespace mooncake
