// A whole forward pass of a pre-norm decoder with gated MLPs (the Llama family) in one call. What follows a
// product is done while its results are in registers, and only the hooks, if any, return to Python.
//
// It computes what mooncake/model/llama.py does step by step, with the same functions, bit for bit.
#pragma once

#include "adapters.h"
#include "attention.h"
#include "grouped.h"
#include "linear.h"

namespace mooncake {

constexpr int32_t NO_WINDOW = INT32_MIN;  // with a group added to it, the kind of layers without a window
constexpr int32_t NOTHING = INT32_MAX;    // no kind
constexpr int FEW_STRIPS = 2;             // of rows: products of so few use the memory themselves

// Mirrored in cpu_decoder.py, as are the structures that follow.
struct DecoderLayer {
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;  // the last two may be null
    const float *cos, *sin;                                          // [num_positions][head_dim / 2]
    const PackedLinear *qkv, *output, *gate_up, *down;  // in a layer without its own KV, `qkv` is queries only
    int32_t kv_layer, owns_kv, window;                  // the cache layer it attends to; window: as in AttentionCall
};

struct Decoder {
    const DecoderLayer* layers;
    const PackedLinear *embedding, *head;
    const LayerAdapter* const* adapters;  // by index, then by layer; null if there are none
    const float* final_norm;
    const float* query_scales;  // [num_positions], what queries are multiplied by once they are rotated; null: nothing
    const int64_t* kept;  // layers whose inputs are kept in the cache, after the KV of all layers
    int64_t num_adapters, num_layers, num_positions, hidden, intermediate, vocab, num_kept;
    int32_t num_heads, num_kv_heads, head_dim, last_owner;  // last_owner: the last layer with its own KV, counted from the first one here
    float eps, scale;
};

struct Step {
    const int64_t *tokens, *positions, *slots, *logit_rows;     // slots: [num_groups][num_tokens]
    const int32_t *query_starts, *context_lens, *block_tables;  // tables: [num_groups][num_sequences][table_stride]
    const int32_t* adapters;  // [num_tokens] indices, -1: none; null if no token of the step has one
    const int32_t* places;    // (group, row of its pages) of each cache layer; null: only one group
    const float* entering;    // [num_tokens][hidden]: the residual stream before the first layer; null: tokens are embedded
    float* leaving;           // the same after the last layer; null: logits are wanted
    float* hidden;            // [num_hidden][hidden]: the same of the last rows of logit_rows, in place of their logits
    int64_t table_stride, num_tokens, num_sequences, num_logits, num_groups, first_layer, last_layer, num_hidden;
};

struct Cache {
    char* base;
    int64_t num_blocks, block_stride, layer_stride, kv_stride, head_stride;  // bytes
    int32_t block_tokens, kind;
};

using LayerCall = int (*)(int layer);  // nonzero: stop
using AttendCall = int (*)(int layer, const float* query, int64_t query_stride, float* mixed);  // instead of attention

// What is left of a step when some of its tokens leave the pass.
struct Thinned {
    const Step* step;          // of those that stay: at least one of each sequence
    const int64_t* rows;       // which they were in the step before, rising
    const int32_t* positions;  // as in AttentionCall
};

using ThinCall = int (*)(int layer, Thinned* left);  // once the layer's KV is written; leaves the step null if all stay

class ForwardPass {
public:
    ForwardPass(const Decoder& model, const Step& step, const Cache& cache, LayerCall before, LayerCall after, AttendCall instead,
                ThinCall thin, int threads)
        : model_(model), step_(step), cache_(cache), before_(before), after_(after), instead_(instead), thin_(thin), threads_(threads) {}

    int run(float* logits) {
        const int64_t T = step_.num_tokens, most = std::max(T, step_.num_logits), hidden = model_.hidden, width = int64_t(model_.num_heads) * model_.head_dim;
        const int64_t qkv_width = width + 2 * int64_t(model_.num_kv_heads) * model_.head_dim;
        static thread_local Scratch memory;
        const int64_t wide = step_.adapters ? 2 * model_.intermediate : 0;
        memory.start(most * (hidden + width + model_.intermediate + wide) + T * qkv_width + 256);
        residual_ = memory.take(most * hidden);
        mixed_ = memory.take(most * width);
        gated_ = memory.take(most * model_.intermediate);
        qkv_ = memory.take(T * qkv_width);
        positions_ = step_.positions;
        slots_ = step_.slots;
        tables_ = step_.block_tables;
        wide_ = memory.take(most * wide);
        call_ = {qkv_, qkv_width, mixed_, step_.block_tables, step_.query_starts, step_.context_lens, step_.table_stride,
                 int(step_.num_sequences), model_.num_heads, model_.num_kv_heads, model_.head_dim, 0, model_.scale * 1.44269504f};
        drop_plans();
        if (int status = check()) return status;
        if (step_.entering)
            std::memcpy(residual_, step_.entering, T * hidden * sizeof(float));
        else
            parallel(T, T < 8 ? 1 : threads_,
                     [&](int64_t t) { unpack_row(*model_.embedding, step_.tokens[t], residual_ + t * hidden); });
        int64_t rows = T;
        bool is_narrowed = false;
        if (!find_runs_of_step()) return BAD_TOKEN;
        const int64_t last_kv = std::min<int64_t>(model_.last_owner, step_.last_layer);
        const bool wants_more = step_.leaving || step_.num_logits || instead_;  // other ranks may need this one to attend
        for (int64_t index = step_.first_layer; index <= step_.last_layer; index++) {
            const DecoderLayer& layer = model_.layers[index];
            keep_input(index);
            multiply(*layer.qkv, residual_, rows, layer.attention_norm, {Then::STORE, qkv_, qkv_width});
            adapt(index, &LayerAdapter::qkv, residual_, layer.attention_norm, qkv_, qkv_width);
            if (int status = write(layer, rows)) return status;
            if (index == last_kv && !wants_more) return OK;
            if (int status = thin(index, rows)) return status;
            if (int status = attend_to(index, layer)) return status;
            if (index == model_.last_owner && !step_.leaving && step_.num_logits < rows) {  // rows without logits are not needed
                rows = step_.num_logits;
                is_narrowed = true;
                keep_rows(mixed_, width);
                keep_rows(residual_, hidden);
                if (step_.adapters)
                    find_runs(rows, model_.adapters, model_.num_adapters,
                              [&](int64_t r) { return step_.adapters[step_.logit_rows[r]]; }, runs_);
                if (index < model_.num_layers - 1) narrow();
            }
            multiply(*layer.output, mixed_, rows, nullptr, {Then::ADD, residual_, hidden});
            adapt(index, &LayerAdapter::output, mixed_, nullptr, residual_, hidden);
            mlp(index, layer, rows);
        }
        if (step_.leaving) {
            std::memcpy(step_.leaving, residual_, T * hidden * sizeof(float));
            return OK;
        }
        if (!is_narrowed) keep_rows(residual_, hidden);
        rows = step_.num_logits - step_.num_hidden;
        if (step_.num_hidden)
            std::memcpy(step_.hidden, residual_ + rows * hidden, step_.num_hidden * hidden * sizeof(float));
        if (rows) multiply(*model_.head, residual_, rows, model_.final_norm, {Then::STORE, logits, model_.vocab});
        return OK;
    }

private:
    int check() const {
        for (int64_t t = 0; t < step_.num_tokens; t++)
            if (step_.tokens[t] < 0 || step_.tokens[t] >= model_.vocab) return BAD_TOKEN;
        for (int64_t r = 0; r < step_.num_logits; r++)
            if (step_.logit_rows[r] < 0 || step_.logit_rows[r] >= step_.num_tokens) return BAD_TOKEN;
        const CacheLayer first = cache_layer(0);
        if (int status = check_positions(step_.positions, step_.num_tokens, rope(model_.layers[0]))) return status;
        if (int status = check_slots(step_.slots, step_.num_groups * step_.num_tokens, first)) return status;
        AttentionCall call = call_;
        for (int64_t group = 0; group < step_.num_groups; group++) {
            call.block_tables = tables_of(group);
            if (int status = check_tables(call, first)) return status;
        }
        return OK;
    }

    // The runs of rows that have an adapter; false if there is no such adapter.
    bool find_runs_of_step() {
        runs_.clear();
        return !step_.adapters || find_runs(step_.num_tokens, model_.adapters, model_.num_adapters,
                                            [&](int64_t t) { return step_.adapters[t]; }, runs_);
    }

    // Lets tokens leave the step.
    int thin(int64_t index, int64_t& rows) {
        if (!thin_) return OK;
        Thinned left{};
        if (thin_(int(index), &left)) return STOPPED_BY_HOOK;
        if (!left.step) return OK;
        rows = left.step->num_tokens;
        move_up(qkv_, call_.query_stride, int64_t(model_.num_heads) * model_.head_dim, left.rows, rows);
        move_up(residual_, model_.hidden, model_.hidden, left.rows, rows);
        step_ = *left.step;
        positions_ = step_.positions;
        slots_ = step_.slots;
        tables_ = step_.block_tables;
        call_.query_starts = step_.query_starts;
        call_.context_lens = step_.context_lens;
        call_.positions = left.positions;
        drop_plans();
        return find_runs_of_step() ? OK : BAD_TOKEN;
    }

    // Moves the first `width` values of these rows, which rise, to the front.
    static void move_up(float* values, int64_t stride, int64_t width, const int64_t* rows, int64_t count) {
        for (int64_t r = 0; r < count; r++)
            if (rows[r] != r) std::memcpy(values + r * stride, values + rows[r] * stride, width * sizeof(float));
    }

    // Where the keys and values that the layer attends to are.
    int32_t group_of(const DecoderLayer& layer) const { return step_.places ? step_.places[2 * layer.kv_layer] : 0; }
    CacheLayer pages_of(const DecoderLayer& layer) const {
        return cache_layer(step_.places ? step_.places[2 * layer.kv_layer + 1] : layer.kv_layer);
    }
    const int32_t* tables_of(int64_t group) const { return tables_ + group * call_.num_sequences * call_.table_stride; }

    CacheLayer cache_layer(int64_t index) const {
        return {cache_.base + index * cache_.layer_stride, cache_.num_blocks, cache_.block_stride, cache_.kv_stride,
                cache_.head_stride, cache_.block_tokens, model_.num_kv_heads, model_.head_dim, cache_.kind};
    }

    Rope rope(const DecoderLayer& layer) const {
        return {layer.cos, layer.sin, model_.num_positions, layer.query_norm, layer.key_norm, model_.eps};
    }

    void multiply(const PackedLinear& layer, const float* from, int64_t rows, const float* norm, Target target) {
        if (!rows) return;
        target.forecast = &forecast_;
        if (rows <= STRIP) prefetch_start(layer, threads_);  // with more rows it does not wait for weights
        const Activations x = prepare(layer, from, layer.inputs, rows, norm, model_.eps, turned_, threads_);
        multiply_by(layer, x, target, threads_);
    }

    // Adds the adapters' contribution to a product `to` of `from`, for the rows that have one.
    void adapt(int64_t index, LowRank LayerAdapter::*product, const float* from, const float* norm, float* to, int64_t stride) {
        for (const AdaptedRun& run : runs_) {
            const LowRank& pair = run.layers[index].*product;
            if (pair.down)
                add_low_rank(pair, from + run.first * pair.down->inputs, run.rows, norm, model_.eps, to + run.first * stride,
                             stride, threads_);
        }
    }

    void mlp(int64_t index, const DecoderLayer& layer, int64_t rows) {
        const int64_t width = model_.intermediate;
        const Target residual{Then::ADD, residual_, model_.hidden, nullptr, &forecast_};
        if (runs_.empty() && rows && takes_gates(layer)) {  // written as the next product takes them
            const Activations gated = room_for(*layer.down, rows, narrow_);
            multiply(*layer.gate_up, residual_, rows, layer.mlp_norm, {Then::GATE, nullptr, 0, &gated});
            return multiply_by(*layer.down, gated, residual, threads_);
        }
        if (runs_.empty()) {
            multiply(*layer.gate_up, residual_, rows, layer.mlp_norm, {Then::GATE, gated_, width});
        } else {
            multiply(*layer.gate_up, residual_, rows, layer.mlp_norm, {Then::STORE, wide_, 2 * width});
            adapt(index, &LayerAdapter::gate_up, residual_, layer.mlp_norm, wide_, 2 * width);
            gate_panels(wide_, rows, width, gated_, threads_);
        }
        multiply(*layer.down, gated_, rows, nullptr, residual);
        adapt(index, &LayerAdapter::down, gated_, nullptr, residual_, model_.hidden);
    }

    static bool takes_gates(const DecoderLayer& layer) {
        const PackedLinear& down = *layer.down;
        const bool is_plain = down.kind == FLOATS || down.kind == BF16S;
        return is_plain && layer.gate_up->kind == down.kind && down.hadamard <= 1 && down.padded() == down.inputs;
    }

    // Writes the keys and values of the step's tokens, if the layer has its own.
    int write(const DecoderLayer& layer, int64_t rows) {
        CacheLayer cache = pages_of(layer);
        const int64_t* slots = slots_ + group_of(layer) * rows;
        if (!layer.owns_kv) cache.num_kv_heads = 0;
        if (layer.owns_kv && before_ && before_(layer.kv_layer)) return STOPPED_BY_HOOK;
        with_pages(cache_.kind, [&](auto page) {
            rope_write_kv<decltype(page)>(qkv_, call_.query_stride, rope(layer), positions_, cache, slots, rows,
                                          model_.num_heads, threads_);
        });
        scale_queries(rows);
        return layer.owns_kv && after_ && after_(layer.kv_layer) ? STOPPED_BY_HOOK : OK;
    }

    void scale_queries(int64_t rows) {
        if (!model_.query_scales) return;
        const int64_t width = int64_t(model_.num_heads) * model_.head_dim;
        parallel(rows, rows < 8 ? 1 : threads_, [&](int64_t t) {
            const float scale = model_.query_scales[positions_[t]];
            float* query = qkv_ + t * call_.query_stride;
            for (int64_t i = 0; i < width; i++) query[i] *= scale;
        });
    }

    int attend_to(int64_t index, const DecoderLayer& layer) {
        if (instead_) return instead_(int(index), qkv_, call_.query_stride, mixed_) ? STOPPED_BY_HOOK : OK;
        forecast_.end();
        attend(call_, plan_of(layer), pages_of(layer), threads_);
        if (index < step_.last_layer && step_.num_tokens > FEW_STRIPS * STRIP) foresee(model_.layers[index + 1]);
        return OK;
    }

    // Has the products that follow bring what this layer will attend to.
    void foresee(const DecoderLayer& layer) {
        const CacheLayer cache = pages_of(layer);
        const AttentionPlan& plan = plan_of(layer);
        if (const int32_t kind = kind_of(layer); foreseen_ != kind) {
            foreseen_ = kind;
            forecast_.clear();
            const int64_t bytes = cache.has_values() ? 2 * cache.kv_stride : cache.num_kv_heads * cache.head_stride;
            for (const Item& item : plan.items)
                if (!item.kv_head && (item.is_shared || call_.rows(item.seq) <= plan.few_rows))  // many rows wait for arithmetic, too
                    for (int t = item.begin / cache.block_tokens; t * cache.block_tokens < item.end; t++)
                        forecast_.add(call_.table(item.seq)[t] * cache.block_stride, bytes);
        }
        forecast_.begin(cache.base);
    }

    // Stores rows [token][hidden] in each token's block, using as many of the block's layers as they need.
    void keep_input(int64_t index) const {
        const int64_t place = std::find(model_.kept, model_.kept + model_.num_kept, index) - model_.kept;
        if (place == model_.num_kept) return;
        with_pages(cache_.kind, [&](auto page) {
            using T = decltype(page);
            const int64_t width = row_bytes<T>(int(model_.hidden)), needed = cache_.block_tokens * width;
            const int64_t room = (needed + cache_.layer_stride - 1) / cache_.layer_stride * cache_.layer_stride;
            char* base = cache_.base + model_.num_layers * cache_.layer_stride + place * room;
            parallel(step_.num_tokens, step_.num_tokens * model_.hidden < (1 << 15) ? 1 : threads_, [&](int64_t t) {
                const int64_t block = step_.slots[t] / cache_.block_tokens, offset = step_.slots[t] % cache_.block_tokens;
                put_row((T*)(base + block * cache_.block_stride + offset * width), residual_ + t * model_.hidden,
                        int(model_.hidden));
            });
        });
    }

    // Layers of a kind share a plan: those with this window, or, without a window, those of one group, because shared parts
    // depend on the block tables.
    int32_t kind_of(const DecoderLayer& layer) const { return layer.window ? layer.window : NO_WINDOW + group_of(layer); }

    // The plan of `call_`, which becomes the layer's.
    const AttentionPlan& plan_of(const DecoderLayer& layer) {
        call_.window = layer.window;
        call_.block_tables = tables_of(group_of(layer));
        for (size_t i = 0; i < num_plans_; i++)
            if (plans_[i].first == kind_of(layer)) return plans_[i].second;
        if (plans_.size() == num_plans_) plans_.emplace_back();
        auto& [kind, plan] = plans_[num_plans_++];
        kind = kind_of(layer);
        Planner(call_, cache_layer(0), plan).run();
        return plan;
    }

    void drop_plans() {
        num_plans_ = 0;
        foreseen_ = NOTHING;
        forecast_.end();
    }

    // From here on the step consists only of rows whose logits are wanted: each run of adjacent ones becomes a sequence
    // over the blocks of its original sequence.
    void narrow() {
        Narrowed& to = narrowed_;
        to = {};
        for (int64_t r = 0; r < step_.num_logits; r++) {
            const int64_t row = step_.logit_rows[r];
            const int seq = int(std::upper_bound(step_.query_starts, step_.query_starts + step_.num_sequences + 1, row) - step_.query_starts) - 1;
            const bool is_first = !r || row != step_.logit_rows[r - 1] + 1 || row == step_.query_starts[seq];
            if (is_first) {
                to.query_starts.push_back(int32_t(r));
                to.context_lens.push_back(0);
                to.sequences.push_back(seq);
            }
            to.positions.push_back(step_.positions[row]);
            to.context_lens.back() = call_.context_lens[seq] - (step_.query_starts[seq + 1] - 1 - int32_t(row));
        }
        to.query_starts.push_back(int32_t(step_.num_logits));
        for (int64_t group = 0; group < step_.num_groups; group++) {
            for (int64_t r = 0; r < step_.num_logits; r++)
                to.slots.push_back(step_.slots[group * step_.num_tokens + step_.logit_rows[r]]);
            for (int seq : to.sequences) {
                const int32_t* table = tables_of(group) + seq * call_.table_stride;
                to.block_tables.insert(to.block_tables.end(), table, table + call_.table_stride);
            }
        }
        positions_ = to.positions.data();
        slots_ = to.slots.data();
        tables_ = to.block_tables.data();
        call_.query_starts = to.query_starts.data();
        call_.context_lens = to.context_lens.data();
        call_.num_sequences = int(to.context_lens.size());
        drop_plans();
    }

    struct Narrowed {
        std::vector<int64_t> positions, slots;
        std::vector<int32_t> query_starts, context_lens, block_tables, sequences;
    };

    void keep_rows(float* rows, int64_t width) const {
        static thread_local Scratch kept;
        float* to = kept.start(step_.num_logits * width);
        for (int64_t r = 0; r < step_.num_logits; r++)
            std::memcpy(to + r * width, rows + step_.logit_rows[r] * width, width * sizeof(float));
        std::memcpy(rows, to, step_.num_logits * width * sizeof(float));
    }

    const Decoder& model_;
    Step step_;  // of the tokens that have not left
    const Cache& cache_;
    const LayerCall before_, after_;
    const AttendCall instead_;
    const ThinCall thin_;
    const int threads_;
    float *residual_ = nullptr, *qkv_ = nullptr, *mixed_ = nullptr, *gated_ = nullptr, *wide_ = nullptr;
    const int64_t *positions_ = nullptr, *slots_ = nullptr;  // of the rows that are computed, slots per group
    const int32_t* tables_ = nullptr;                        // per group
    AttentionCall call_{};
    size_t num_plans_ = 0;
    int32_t foreseen_ = NOTHING;  // the kind of layers that the forecast is of
    static thread_local std::vector<std::pair<int32_t, AttentionPlan>> plans_;  // by kind; the first `num_plans_` are valid
    static thread_local Forecast forecast_;
    static thread_local Narrowed narrowed_;
    static thread_local Scratch turned_, narrow_;
    static thread_local std::vector<AdaptedRun> runs_;
};

inline thread_local std::vector<std::pair<int32_t, AttentionPlan>> ForwardPass::plans_;
inline thread_local Forecast ForwardPass::forecast_;
inline thread_local ForwardPass::Narrowed ForwardPass::narrowed_;
inline thread_local Scratch ForwardPass::turned_, ForwardPass::narrow_;
inline thread_local std::vector<AdaptedRun> ForwardPass::runs_;

}  // namespace mooncake
