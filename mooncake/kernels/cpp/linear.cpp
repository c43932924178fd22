// The inner loops of products: in vectors, and in tiles.

#include "linear.h"

#include "grouped.h"

namespace mooncake {
namespace {

constexpr int DEEP = 192;                     // inputs at a time, so that this part of a panel stays in L1 for all strips
constexpr int AHEAD = 6144;                   // bytes to prefetch ahead: the hardware prefetcher stops at every 4 KiB
constexpr int AHEAD_IN_TILES = 3072;          // likewise
constexpr int64_t NEAR_PANEL = 40 << 10;      // bytes of a panel that the L1 cache keeps beside what passes through it

// ---- the inner loops ------------------------------------------------------------------------------------------------

template <int ROWS> struct Sums {
    vf at[ROWS][PANEL_VECS];

    void start(const float* from, bool fresh) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) at[r][v] = fresh ? vf{} : load(from + r * PANEL + v * W);
    }
    void add(const vf* weights, const float* x) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) at[r][v] += weights[v] * x[r];
    }
    void finish(float* to) const {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) store(to + r * PANEL + v * W, at[r][v]);
    }
};

inline void prefetch_panel(const char* at) {
#pragma GCC unroll 2
    for (int byte = 0; byte < PANEL * 4; byte += 64) __builtin_prefetch(at + AHEAD + byte, 0, NEAR);
}

// What a loop prefetches for every STEPS of its steps. A panel that is read only once: its own next lines.
struct OwnLines {
    static constexpr int STEPS = 1;
    void bring(const char* panel) const { prefetch_panel(panel); }
};

// For a panel that several strips read: a loop that waits for its own weights leaves the memory idle once it has them.
struct OtherLines {
    static constexpr int STEPS = PACE;
    const char* weights;
    int num_weights;
    const char* forecast = nullptr;
    int num_forecast = 0;

    void bring(const char*) {
        bring(weights, num_weights);
        bring(forecast, num_forecast);
    }

private:
    static void bring(const char*& from, int& lines) {
        if (lines <= 0) return;
#pragma GCC unroll 8
        for (int i = 0; i < PACE; i++, from += 64) __builtin_prefetch(from, 0, SECOND_CACHE);
        lines -= PACE;
    }
};
static_assert(ROW_UNIT / 4 % PACE == 0 && DEEP % ROW_UNIT == 0, "every loop has a multiple of PACE steps");
static_assert(Forecast::LINES % PACE == 0, "no more is brought than a stretch has");

template <WeightKind KIND> constexpr int GROUP = 4 / sizeof(Held<KIND>);  // inputs whose weights are PANEL * 4 bytes

// Input g of such a group, as exact weights of PANEL outputs.
template <WeightKind KIND> inline void widen(const char* group, int g, vf* out) {
#pragma GCC unroll 2
    for (int v = 0; v < PANEL_VECS; v++) {
        if (KIND == BF16S) {
            const vu pairs = load_as<vu>(group + v * W * 4);
            out[v] = (vf)(g ? pairs & 0xffff0000u : pairs << 16);
        } else {
            out[v] = load((const Held<KIND>*)group + g * PANEL + v * W);
        }
    }
}

// sums[row][PANEL] += strip[k][row] * panel[k][PANEL] over `deep` of k.
template <WeightKind KIND, int ROWS, class Lines>
void multiply(const void* strip, const char* panel, int deep, void* sums, bool fresh, Lines lines) {
    const float* x = (const float*)strip;
    Sums<ROWS> acc;
    acc.start((const float*)sums, fresh);
    for (int k = 0; k < deep; k += Lines::STEPS * GROUP<KIND>) {
        lines.bring(panel);
        for (int step = 0; step < Lines::STEPS; step++, panel += PANEL * 4)
#pragma GCC unroll 4
            for (int g = 0; g < GROUP<KIND>; g++, x += ROWS) {
                vf weights[PANEL_VECS];
                widen<KIND>(panel, g, weights);
#pragma GCC unroll 2
                for (int v = 0; !FOLDS_BROADCASTS && ROWS <= 4 && v < PANEL_VECS; v++) weights[v] = in_register(weights[v]);
                acc.add(weights, x);
            }
    }
    acc.finish((float*)sums);
}

// The weights of `deep` inputs as float32 [deep][PANEL], for use more than once.
template <WeightKind KIND> void widen_part(const char* panel, int deep, float* out) {
    for (int k = 0; k < deep; k += GROUP<KIND>, panel += PANEL * 4) {
        prefetch_panel(panel);
        for (int g = 0; g < GROUP<KIND>; g++, out += PANEL) {
            vf weights[PANEL_VECS];
            widen<KIND>(panel, g, weights);
            for (int v = 0; v < PANEL_VECS; v++) store(out + v * W, weights[v]);
        }
    }
}

// As `multiply`, for activations as narrow as the weights, in units of 4 bytes.
template <WeightKind KIND, int ROWS, class Lines>
void multiply_units(const void* strip, const char* panel, int deep, void* sums, bool fresh, Lines lines) {
    using Sum = std::conditional_t<KIND == BF16S, vf, vi>;
    const uint32_t* x = (const uint32_t*)strip;
    char* to = (char*)sums;
    Sum acc[ROWS][PANEL_VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; v++) acc[r][v] = fresh ? Sum{} : load_as<Sum>(to + (r * PANEL + v * W) * 4);
    for (int k = 0; k < deep; k += Lines::STEPS * G<KIND>) {
        lines.bring(panel);
        for (int step = 0; step < Lines::STEPS; step++, panel += PANEL * 4, x += ROWS) {
            const vi weights[PANEL_VECS] = {load_as<vi>(panel), load_as<vi>(panel + W * 4)};
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                for (int v = 0; v < PANEL_VECS; v++) acc[r][v] = add_products(acc[r][v], x[r], weights[v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; v++) std::memcpy(to + (r * PANEL + v * W) * 4, &acc[r][v], sizeof(Sum));
}

// The inner loops for strips of FIRST and more rows, by WeightKind.
template <class Lines> using Multiply = void (*)(const void*, const char*, int, void*, bool, Lines);

template <class Lines, int FIRST, size_t... I> constexpr auto strip_loops(std::index_sequence<I...>) {
    using Row = std::array<Multiply<Lines>, 5>;
    return std::array<Row, sizeof...(I)>{
        Row{multiply<FLOATS, int(I) + FIRST, Lines>,
            MULTIPLIES_BF16 ? multiply_units<BF16S, int(I) + FIRST, Lines> : multiply<BF16S, int(I) + FIRST, Lines>,
            multiply<CODES, int(I) + FIRST, Lines>, multiply_units<BOTH_CODES, int(I) + FIRST, Lines>,
            multiply_units<BOTH_CODES, int(I) + FIRST, Lines>}...};
}

constexpr int LOW = STRIP / 2;  // rows of the lowest strip where there are several: they are of nearly equal height
constexpr auto MULTIPLY_ONE = strip_loops<OwnLines, 1>(std::make_index_sequence<STRIP>());
constexpr auto MULTIPLY_SOME = strip_loops<OtherLines, LOW>(std::make_index_sequence<STRIP - LOW + 1>());

// sums[p][row][PANEL] of PANELS panels, each `apart` bytes behind the one before, for a strip of few rows.
template <WeightKind KIND, int ROWS, int PANELS>
void multiply_beside(const char* strip, const char* panel, int64_t apart, int64_t deep, float* sums) {
    constexpr bool IN_UNITS = KIND == BF16S ? MULTIPLIES_BF16 : KIND >= BOTH_CODES;
    using Sum = std::conditional_t<KIND >= BOTH_CODES, vi, vf>;
    Sum acc[PANELS][ROWS][PANEL_VECS] = {};
    for (int64_t k = 0; k < deep; k += GROUP<KIND>, panel += PANEL * 4) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) prefetch_panel(panel + p * apart);
#pragma GCC unroll 4
        for (int g = 0; g < (IN_UNITS ? 1 : GROUP<KIND>); g++, strip += ROWS * 4)
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                const char* group = panel + p * apart;
                vf weights[PANEL_VECS];
                if (!IN_UNITS) widen<KIND>(group, g, weights);
#pragma GCC unroll 2
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                    for (int v = 0; v < PANEL_VECS; v++)
                        if constexpr (IN_UNITS)
                            acc[p][r][v] = add_products(acc[p][r][v], load_as<uint32_t>(strip + r * 4), load_as<vi>(group + v * W * 4));
                        else
                            acc[p][r][v] += weights[v] * ((const float*)strip)[r];
            }
    }
    std::memcpy(sums, acc, sizeof acc);
}

using MultiplyBeside = void (*)(const char*, const char*, int64_t, int64_t, float*);

// The same for 1 and 2 rows, and for 2 panels and more.
template <WeightKind KIND>
constexpr MultiplyBeside ONE_ROW_BESIDE[] = {multiply_beside<KIND, 1, 2>, multiply_beside<KIND, 1, 3>, multiply_beside<KIND, 1, 4>};
template <WeightKind KIND> constexpr MultiplyBeside TWO_ROWS_BESIDE[] = {multiply_beside<KIND, 2, 2>};
static_assert(PANEL_RUN == 4 && BESIDE_ROWS == 2, "there is a loop for each run that Cuts makes");

// ---- a product --------------------------------------------------------------------------------------------------------

// Loads `value` although it is not needed: memory lines that are written completely without having been read slow tiles
// down (seen on Sapphire Rapids, mostly in the product for q, k and v).
inline void hold([[maybe_unused]] vf value) {
#if defined(__x86_64__)
    asm volatile("" ::"v"(value));
#endif
}

// Where a panel's sums go. What is the same for all rows stays in registers.
template <WeightKind KIND, Then THEN> class Delivery {
public:
    Delivery(const PackedLinear& layer, const Activations& x, const Target& target, int64_t index)
        : target_(target), row_scales_(x.row_scales), index_(index), column_(index * PANEL), left_(layer.outputs - column_) {
        for (int v = 0; v < PANEL_VECS; v++) {
            bias_[v] = layer.bias ? load(layer.bias + column_ + v * W) : vf{};
            scales_[v] = layer.scales ? load(layer.scales + column_ + v * W) : vf{};
            if (KIND == BOTH_CODES) middles_[v] = load_as<vi>(layer.sums + column_ + v * W) * 128;
        }
    }

    // Stores the sums [rows][PANEL] of rows `first` and following. If they go to the next product, they are one strip.
    void put(const float* sums, int64_t first, int64_t rows) const {
        if constexpr (THEN == Then::GATE)
            put_gated(sums, first, rows);
        else if (left_ < PANEL)
            put_part(sums, first, rows);
        else
            put_whole(sums, first, rows);
    }

    // Prefetches where `rows` rows will be written. A function that only prefetches has no effect that GCC knows of, so
    // unless it is inlined early its calls are dropped.
    __attribute__((always_inline)) void bring(int64_t first, int64_t rows) const {
        if (THEN == Then::GATE) return;
        const float* to = address(first);
        for (; rows > 0; rows--, to += target_.stride)
            for (int v = 0; v < PANEL_VECS; v++) __builtin_prefetch(to + v * W, 0, SECOND_CACHE);
    }

private:
    float* address(int64_t row) const { return target_.to + row * target_.stride + column_; }

    vf result(const float* sums, int64_t row, int v) const {
        const float* at = sums + v * W;
        if (KIND == BOTH_CODES)
            return __builtin_convertvector(load_as<vi>(at) - middles_[v], vf) * (scales_[v] * row_scales_[row]) + bias_[v];
        if (KIND == WIDE_CODES) return load(at) * (scales_[v] * row_scales_[row]) + bias_[v];
        return (KIND == CODES ? load(at) * scales_[v] : load(at)) + bias_[v];
    }

    void put_whole(const float* sums, int64_t first, int64_t rows) const {
        float* to = address(first);
        for (int64_t r = first; r < first + rows; r++, sums += PANEL, to += target_.stride)
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) {
                const vf before = load(to + v * W), now = result(sums, r, v);
                hold(before);
                store(to + v * W, THEN == Then::ADD ? before + now : now);
            }
    }

    void put_gated(const float* sums, int64_t first, int64_t rows) const {
        const auto gated = [&](int64_t r) { return silu(result(sums, r, 0)) * result(sums, r, 1); };
        if (target_.next && target_.next->unit == ROW_UNIT) {
            char* tile = target_.next->tile_row(first, column_ / 2 * int64_t(sizeof(bf16)));
            for (int64_t r = first; r < first + rows; r++, sums += PANEL, tile += ROW_UNIT) store((bf16*)tile, gated(r));
        } else if (target_.next) {
            alignas(64) float strip[STRIP * W];
            const int64_t units = target_.next->unit ? W / 2 : W;  // of 4 bytes: two of bfloat16, or one of float32
            for (int64_t r = first; r < first + rows; r++, sums += PANEL)
                if (target_.next->unit)
                    store((bf16*)(strip + (r - first) * units), gated(r));
                else
                    store(strip + (r - first) * units, gated(r));
            float* to = (float*)(target_.next->memory + first * target_.next->row_bytes) + index_ * units * rows;
            TURN[rows - 1](strip, units, units, units, to);
        } else {
            float* to = target_.to + first * target_.stride + column_ / 2;
            for (int64_t r = first; r < first + rows; r++, sums += PANEL, to += target_.stride) store(to, gated(r));
        }
    }

    void put_part(const float* sums, int64_t first, int64_t rows) const {  // the last panel of some outputs
        float* to = address(first);
        for (int64_t r = first; r < first + rows; r++, sums += PANEL, to += target_.stride)
            for (int v = 0; v * W < left_; v++) {
                const vf now = result(sums, r, v);
                for (int64_t i = v * W; i < std::min<int64_t>(left_, (v + 1) * W); i++)
                    to[i] = THEN == Then::ADD ? to[i] + now[i % W] : now[i % W];
            }
    }

    const Target& target_;
    const float* row_scales_;
    int64_t index_, column_, left_;
    vf bias_[PANEL_VECS], scales_[PANEL_VECS];
    vi middles_[PANEL_VECS];
};

// Calls body(then) with `then` as a constant.
template <class Body> void with_then(Then then, const Body& body) {
    switch (then) {
        case Then::GATE: return body(std::integral_constant<Then, Then::GATE>{});
        case Then::ADD: return body(std::integral_constant<Then, Then::ADD>{});
        default: return body(std::integral_constant<Then, Then::STORE>{});
    }
}

template <WeightKind KIND>
void deliver(const PackedLinear& layer, const Activations& x, const Target& target, int64_t index, const float* sums, int64_t first,
             int64_t rows) {
    with_then(target.then, [&](auto then) { Delivery<KIND, then>(layer, x, target, index).put(sums, first, rows); });
}

// sums[row][PANEL] for the rows of one strip, in vectors; for each plane of it.
template <WeightKind KIND> void sum_strip(const PackedLinear& layer, const char* panel, const char* strip, int height, float* sums) {
    if constexpr (KIND == FLOATS || KIND == BF16S)
        if (layer.code_bits)
            return with_codes(layer, [&](auto bits, auto levels) {
                MULTIPLY_CODES<KIND, bits, levels>[height - 1](layer, panel, strip, sums);
            });
    MULTIPLY_ONE[height - 1][KIND](strip, panel, int(layer.padded()), sums, true, {});
}

// Whether narrow weights are widened once, in memory, for `strips` strips. Where a core has vectors of 8 floats, bfloat16
// is widened beside the products by units that they do not use, and int8 takes those only in part (seen on Zen 3).
template <WeightKind KIND> constexpr bool pays_to_widen(int64_t strips) { return W == 16 || (KIND != BF16S && strips > 2); }

// The same for several strips, part by part of the panel.
template <WeightKind KIND>
void sum_strips(const PackedLinear& layer, int64_t index, const Activations& x, int64_t from_strip, int64_t to_strip, float* sums,
                float* near, Forecast* forecast) {
    constexpr int SIZE = sizeof(Held<KIND>);
    const char* panel = layer.panel(index);
    const int64_t inputs = layer.padded(), count = to_strip - from_strip, size = x.unit ? SIZE : 4;
    const bool is_coded = layer.code_bits, is_widened = SIZE < 4 && !x.unit && (is_coded || pays_to_widen<KIND>(count));
    for (int64_t k = 0; k < inputs; k += DEEP) {
        const int deep = int(std::min<int64_t>(DEEP, inputs - k)), bytes = deep * PANEL * SIZE;
        const char *part = panel + k * PANEL * SIZE, *next = part + bytes;
        const int lines = is_coded ? 0 : int((bytes / 64 + count - 1) / count);
        if (is_coded)
            unpack_part(layer, index, k, k + deep, x.unit, near);
        else if (is_widened)
            widen_part<KIND>(part, deep, near);
        if (is_coded || is_widened) part = (const char*)near;
        float* to = sums;
        for (int64_t strip = from_strip; strip < to_strip; strip++, next += lines * 64) {
            const int height = x.strips.height(strip) * x.planes;
            OtherLines others{next, lines};
            if (forecast) others.forecast = forecast->take(others.num_forecast);
            MULTIPLY_SOME[height - LOW][is_widened ? FLOATS : KIND](x.strip(strip) + k * height * size, part, deep, to, k == 0, others);
            to += height * PANEL;
        }
    }
}

template <WeightKind KIND>
void sum_in_vectors(const PackedLinear& layer, int64_t index, const Activations& x, int64_t from_strip, int64_t to_strip, float* sums,
                    float* near, Forecast* forecast) {
    const char* panel = layer.panel(index);
    if constexpr (KIND == GROUPED_CODES) {
        const auto& loops = layer.code_bits == 4 ? MULTIPLY_GROUPS<4> : MULTIPLY_GROUPS<8>;
        for (int64_t strip = from_strip; strip < to_strip; strip++) {
            const int height = x.strips.height(strip);
            loops[height - 1](layer, panel, x.strip(strip), sums);
            sums += height * PANEL;
        }
    } else if (to_strip - from_strip == 1) {
        sum_strip<KIND>(layer, panel, x.strip(from_strip), x.strips.height(from_strip) * x.planes, sums);
    } else {
        sum_strips<KIND>(layer, index, x, from_strip, to_strip, sums, near, forecast);
    }
}

// `count` panels of codes as weights. On its own, since it would be inlined into the loops over tiles.
[[gnu::noinline]] const char* unpacked_panels(const PackedLinear& layer, int64_t index, int64_t count) {
    static thread_local Scratch scratch;
    const int64_t bytes = layer.row_bytes() * PANEL;
    char* panels = scratch.start<char>(count * bytes);
    for (int64_t i = 0; i < count; i++) unpack_part(layer, index + i, 0, layer.inputs, ROW_UNIT, panels + i * bytes);
    return panels;
}

// `count` panels in the form that tiles take.
inline const char* panels_for_tiles(const PackedLinear& layer, int64_t index, int64_t count) {
    return layer.code_bits ? unpacked_panels(layer, index, count) : layer.panel(index);
}

// With one strip, it waits for its weights; with several, each prefetches part of the next panel. Meanwhile the results
// of the strip before are delivered, a few rows at a time: the tiles' unit and the vectors' work side by side.
template <WeightKind KIND, Then THEN, Strip HOW>
void strips_in_tiles(const PackedLinear& layer, const Activations& x, const Target& target, int64_t index, int64_t from_strip,
                     int64_t to_strip) {
    constexpr int PANEL_LINES = TILE_ROWS * PANEL * 4 / 64;  // per panel, for every 64 bytes of a row
    alignas(64) float both[2][TILE_STRIP * PANEL];
    const Delivery<KIND, THEN> delivery(layer, x, target, index);
    const char* panel = panels_for_tiles(layer, index, 1);
    const int64_t count = to_strip - from_strip;
    const int lines = int((PANEL_LINES + count - 1) / count);
    const char* ahead = panel + (count == 1 ? AHEAD_IN_TILES : x.row_bytes * PANEL);
    const int64_t steps = x.row_bytes / 64, rows_at_once = (TILE_STRIP + steps - 1) / steps;
    const float* before = nullptr;  // what is left of the strip before
    int64_t row = 0, rows_left = 0;
    Tiles tiles(x.strips.height(from_strip) * x.planes);
    for (int64_t strip = from_strip; strip < to_strip; strip++, ahead += lines * x.row_bytes) {
        const int height = x.strips.height(strip), rows = height * x.planes;
        const int64_t first = x.strips.first(strip);
        float* sums = both[strip % 2];
        tiles.shape(rows);
        int64_t brought = 0;
        multiply_tiles<KIND, HOW>(x.strip(strip), rows, panel, x.row_bytes, (char*)sums, ahead, lines, [&] {
            delivery.bring(first + brought, std::min<int64_t>(rows_at_once, height - brought));
            brought = std::min<int64_t>(brought + rows_at_once, height);
            if (!rows_left) return;
            const int64_t some = std::min(rows_at_once, rows_left);
            delivery.put(before, row, some);
            before += some * PANEL, row += some, rows_left -= some;
        });
        if (KIND == WIDE_CODES) join_planes(sums, height);
        before = sums, row = first, rows_left = height;
    }
    delivery.put(before, row, rows_left);
}

template <WeightKind KIND>
void product_in_tiles(const PackedLinear& layer, const Activations& x, const Target& target, int64_t index, int64_t from_strip,
                      int64_t to_strip) {
    const bool is_near = x.row_bytes * PANEL <= NEAR_PANEL && to_strip - from_strip > 1;
    with_then(target.then, [&](auto then) {
        (is_near ? strips_in_tiles<KIND, then, Strip::STREAMED> : strips_in_tiles<KIND, then, Strip::KEPT>)(
            layer, x, target, index, from_strip, to_strip);
    });
}

template <WeightKind KIND>
void product_in_vectors(const PackedLinear& layer, const Activations& x, const Target& target, int64_t index, int64_t from_strip,
                        int64_t to_strip) {
    static thread_local Scratch scratch;
    const int64_t first = x.strips.first(from_strip), rows = x.strips.first(to_strip) - first;
    scratch.start(rows * x.planes * PANEL + DEEP * PANEL + 64);
    float *sums = scratch.take(rows * x.planes * PANEL), *near = scratch.take(DEEP * PANEL);
    sum_in_vectors<KIND>(layer, index, x, from_strip, to_strip, sums, near, target.forecast);
    if constexpr (KIND == WIDE_CODES) {
        vi middles[PANEL_VECS];
        for (int v = 0; v < PANEL_VECS; v++) middles[v] = load_as<vi>(layer.sums + index * PANEL + v * W) * 128;
        for (int64_t strip = from_strip; strip < to_strip; strip++) {
            const int height = x.strips.height(strip);
            join_planes(sums, height, middles);
            deliver<KIND>(layer, x, target, index, sums, x.strips.first(strip), height);
            sums += 2 * height * PANEL;
        }
    } else if (target.next) {
        for (int64_t strip = from_strip; strip < to_strip; strip++) {
            const int height = x.strips.height(strip);
            deliver<KIND>(layer, x, target, index, sums, x.strips.first(strip), height);
            sums += height * PANEL;
        }
    } else {
        deliver<KIND>(layer, x, target, index, sums, first, rows);
    }
}

// Two adjacent panels for a few rows, where only the weights are waited for.
template <WeightKind KIND>
void product_of_two(const PackedLinear& layer, const Activations& x, const Target& target, int64_t index) {
    alignas(64) float sums[TILE_STRIP * PANEL];
    const int rows = int(x.strips.rows), height = rows * x.planes;
    Tiles tiles(height);
    multiply_two<KIND>(x.strip(0), height, panels_for_tiles(layer, index, 2), x.row_bytes * PANEL, x.row_bytes, (char*)sums, AHEAD_IN_TILES);
    for (int i = 0; i < 2; i++) {
        float* of_panel = sums + i * TILE_ROWS * PANEL;
        if (KIND == WIDE_CODES) join_planes(of_panel, rows);
        deliver<KIND>(layer, x, target, index + i, of_panel, 0, rows);
    }
}

// `count` adjacent panels for a row, or two.
template <WeightKind KIND>
void product_beside(const PackedLinear& layer, const Activations& x, const Target& target, int64_t index, int64_t count) {
    alignas(64) float sums[PANEL_RUN * PANEL];
    const int rows = int(x.strips.rows);
    const auto multiply_all = rows == 1 ? ONE_ROW_BESIDE<KIND>[count - 2] : TWO_ROWS_BESIDE<KIND>[count - 2];
    multiply_all(x.strip(0), layer.panel(index), layer.panel_bytes(), layer.padded(), sums);
    for (int64_t i = 0; i < count; i++) deliver<KIND>(layer, x, target, index + i, sums + i * rows * PANEL, 0, rows);
}

template <WeightKind KIND>
void item_of(const PackedLinear& layer, const Activations& x, const Target& target, const Cuts& how, int64_t item) {
    const auto of_panel = how.is_tiled ? product_in_tiles<KIND> : product_in_vectors<KIND>;
    const int64_t first = (how.is_tiled ? item % how.runs : item / how.cuts) * how.run;
    const int64_t cut = how.is_tiled ? item / how.runs : item % how.cuts, end = std::min(first + how.run, how.panels);
    if constexpr (W < 16 && KIND < WIDE_CODES)
        if (how.are_beside && end - first > 1) return product_beside<KIND>(layer, x, target, first, end - first);
    for (int64_t index = first; index < end; index++) {
        if (how.is_small && index + 1 < end)
            product_of_two<KIND>(layer, x, target, index++);
        else
            of_panel(layer, x, target, index, cut * how.strips / how.cuts, (cut + 1) * how.strips / how.cuts);
    }
}

}  // namespace

void product_item(const PackedLinear& layer, const Activations& x, const Target& target, const Cuts& how, int64_t item) {
    with_kind(layer.kind, [&](auto kind) { item_of<kind>(layer, x, target, how, item); });
}

}  // namespace mooncake
