// The functions of reference.py for CPUs, and a whole decoder in one call. Activations are float32 on both sides;
// weights and pages keep their types. The plain C interface (pointers, strides, int status) compiles in seconds and
// does not depend on the version of torch. The headers of cpp/, each built on those before: vectors.h, pool.h, sampling.h,
// pages.h, steps.h, recurrent.h; of products hadamard.h, packed.h, tiles.h, activations.h, grouped.h, forecast.h, linear.h, experts.h,
// adapters.h; of attention attention_plan.h, score_tiles.h, mix_tiles.h, attend_*.h, attention.h; then decoder.h. What
// takes long to compile has a file of its own: linear.cpp, attention.cpp.

#include "cpp/decoder.h"
#include "cpp/experts.h"
#include "cpp/grouped.h"
#include "cpp/recurrent.h"
#include "cpp/sampling.h"

using namespace mooncake;

// The end of a function whose `try` begins with its body: no exception may reach Python.
#define OR_NO_MEMORY catch (const std::bad_alloc&) { return NO_MEMORY; }

extern "C" {

// Size in bytes of a structure that Python mirrors; 0 if unknown.
int mc_size_of(const char* name) {
    static constexpr std::pair<const char*, size_t> SIZES[] = {
        {"PackedLinear", sizeof(PackedLinear)}, {"CacheLayer", sizeof(CacheLayer)}, {"Rope", sizeof(Rope)},
        {"Draw", sizeof(Draw)},                 {"DecoderLayer", sizeof(DecoderLayer)}, {"Decoder", sizeof(Decoder)},
        {"LayerAdapter", sizeof(LayerAdapter)}, {"Step", sizeof(Step)},                 {"Cache", sizeof(Cache)},
        {"Experts", sizeof(Experts)},           {"RecurrentCall", sizeof(RecurrentCall)}, {"Thinned", sizeof(Thinned)},
    };
    for (const auto& [known, size] : SIZES)
        if (!std::strcmp(name, known)) return int(size);
    return 0;
}

// `positions` and `log_sums` may be null; see AttentionCall.
int mc_paged_attention(const float* query, int64_t query_stride, float* output, const CacheLayer* cache, int num_heads,
                       const int32_t* block_tables, int64_t table_stride, const int32_t* query_starts,
                       const int32_t* context_lens, int num_sequences, float scale, int window, float cap,
                       const float* sinks, const float* alibi_slopes, const int32_t* positions, float* log_sums, int threads) try {
    const AttentionCall call{query, query_stride, output, block_tables, query_starts, context_lens, table_stride, num_sequences,
                             num_heads, cache->num_kv_heads, cache->head_dim, window, scale * 1.44269504f, cap * 1.44269504f,
                             positions, log_sums, sinks, alibi_slopes};
    if (int status = check_tables(call, *cache)) return status;
    static thread_local AttentionPlan plan;
    Planner(call, *cache, plan).run();
    attend(call, plan, *cache, threads);
    return OK;
} OR_NO_MEMORY

int mc_rope_write_kv(float* qkv, int64_t qkv_stride, const Rope* rope, const int64_t* positions, const CacheLayer* cache,
                     int num_heads, const int64_t* slots, int64_t tokens, int threads) try {
    if (int status = check_positions(positions, tokens, *rope)) return status;
    if (int status = check_slots(slots, tokens, *cache)) return status;
    with_pages(cache->kind, [&](auto page) {
        rope_write_kv<decltype(page)>(qkv, qkv_stride, *rope, positions, *cache, slots, tokens, num_heads, threads);
    });
    return OK;
} OR_NO_MEMORY

int mc_copy_turned(const Rope* rope, const CacheLayer* cache, const int64_t* sources, const int64_t* slots, const int64_t* shifts,
                   int64_t tokens, int threads) try {
    if (int status = check_positions(shifts, tokens, *rope)) return status;
    for (const int64_t* places : {sources, slots})
        if (int status = check_slots(places, tokens, *cache)) return status;
    with_pages(cache->kind, [&](auto page) { copy_turned<decltype(page)>(*cache, *rope, sources, slots, shifts, tokens, threads); });
    return OK;
} OR_NO_MEMORY

// `update` may be null: then only normalises.
int mc_add_rms_norm(float* residual, const float* update, const float* weight, float* out, int64_t tokens, int width, float eps,
                    int threads) try {
    add_rms_norm(residual, update, weight, out, tokens, width, eps, threads);
    return OK;
} OR_NO_MEMORY

int mc_silu_mul(const float* gate_up, float* out, int64_t tokens, int width, int threads) try {
    silu_mul(gate_up, out, tokens, width, threads);
    return OK;
} OR_NO_MEMORY

int mc_recur(const RecurrentCall* call, int threads) try {
    if (int status = check_runs(*call)) return status;
    recur(*call, threads);
    return OK;
} OR_NO_MEMORY

int mc_panel_width() { return PANEL; }

// Bytes of activations that products with such weights take at once: 64 (tiles), 4 (lanes), 0 (float32 activations).
int mc_activation_unit(int kind) { return unit_of(kind); }

// `rows` is the published matrix [outputs][inputs]: float32, bfloat16 bits or int8 codes, depending on `layer->kind`.
int mc_pack(const PackedLinear* layer, const void* rows, void* panels, int threads) try {
    with_kind(layer->kind, [&](auto kind) {
        using T = Held<kind>;
        pack<kind>(*layer, (const T*)rows, (T*)panels, threads);
    });
    return OK;
} OR_NO_MEMORY

// `codes` [outputs][inputs] are bytes: indices of levels, or int8; scales and offsets (null: none) are [outputs][inputs
// / group].
int mc_pack_groups(const PackedLinear* layer, const uint8_t* codes, const float* scales, const float* offsets, char* panels,
                   int threads) try {
    pack_groups(*layer, codes, scales, offsets, panels, threads);
    return OK;
} OR_NO_MEMORY

int mc_unpack_rows(const PackedLinear* layer, const int64_t* indices, int64_t count, float* out) try {
    for (int64_t i = 0; i < count; i++)
        if (indices[i] < 0 || indices[i] >= layer->outputs) return BAD_TOKEN;
    for (int64_t i = 0; i < count; i++) unpack_row(*layer, indices[i], out + i * layer->inputs);
    return OK;
} OR_NO_MEMORY

int mc_linear(const PackedLinear* layer, const float* from, int64_t from_stride, float* to, int64_t rows, int threads) try {
    if (!rows) return OK;
    static thread_local Scratch memory;
    const Activations x = prepare(*layer, from, from_stride, rows, nullptr, 0, memory, threads);
    multiply_by(*layer, x, {Then::STORE, to, layer->outputs}, threads);
    return OK;
} OR_NO_MEMORY

// `chosen` and `shares` are [tokens][per_token], `hidden` and `out` [tokens][width].
int mc_experts(const Experts* experts, const float* hidden, const int64_t* chosen, const float* shares, int64_t tokens,
               int64_t per_token, float* out, int threads) try {
    ExpertPass(*experts, hidden, chosen, shares, tokens, per_token, out, threads).run();
    return OK;
} OR_NO_MEMORY

// tokens[i]: the next token after the logits rows[i] [vocab]; -1 if they are not finite. positions[i]: that token's
// position. Null draws: the most likely tokens.
int mc_sample(const float* const* rows, int64_t count, int64_t vocab, const Draw* draws, const int64_t* positions, int64_t* tokens,
              int threads) try {
    sample(rows, count, vocab, draws, positions, tokens, threads);
    return OK;
} OR_NO_MEMORY

// Log-probabilities after the rows rows[i] of `logits`: of tokens[i], with its rank (NaN and 0 if the row is not
// finite), and of the counts[i] most likely tokens, in top_ids and top_logprobs [count][most].
int mc_score(const float* logits, int64_t stride, int64_t count, int64_t vocab, const int64_t* rows, const int64_t* tokens,
             const int64_t* counts, int64_t most, double* logprobs, int64_t* ranks, int64_t* top_ids, double* top_logprobs,
             int threads) try {
    score(logits, stride, count, vocab, rows, tokens, counts, most, logprobs, ranks, top_ids, top_logprobs, threads);
    return OK;
} OR_NO_MEMORY

// Float32 logits [num_logits][vocab]. The hooks may be null.
int mc_forward(const Decoder* model, const Step* step, const Cache* cache, LayerCall before, LayerCall after, AttendCall instead,
               ThinCall thin, float* logits, int threads) try {
    return ForwardPass(*model, *step, *cache, before, after, instead, thin, threads).run(logits);
} OR_NO_MEMORY
}
