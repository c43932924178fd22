// The matrix unit of some processors (Intel AMX): sums of products of two tiles, each up to 16 rows of 64 bytes.
//
// Panels of packed weights are tiles as stored: a row of PANEL * 4 bytes has the pairs (bfloat16) or fours (int8) of
// inputs of 16 outputs and then of the next 16. Activations have their own tiles: for every 64 bytes of a row, those of
// all rows. A result is one sum over inputs in a fixed order, whatever other rows are in its tile; NaN and infinity
// propagate.
#pragma once

#include "packed.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <immintrin.h>
#define MOONCAKE_TILES
#endif

namespace mooncake {

constexpr int TILE_ROWS = 16;
constexpr int PACE = 8;  // cache lines to prefetch at a time: of many at once a core drops most
constexpr int TILE_STRIP = 2 * TILE_ROWS;  // rows multiplied at once: 4 tiles of sums, 2 of activations, 2 of weights

// Whether tiles of activations stay in the L1 cache, or pass it by: then it keeps a panel that fits, for all strips.
enum class Strip { KEPT, STREAMED };

#if defined(MOONCAKE_TILES)

static_assert(PANEL == 2 * TILE_ROWS);

// Whether this process may use tiles: Linux only saves their 8 KiB of registers for processes that ask.
inline bool has_tiles() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool has = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return has;
}

// GCC does not tell its optimiser that loading tiles reads memory; this makes earlier writes take effect.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// This thread's tiles, configured for strips of `rows` rows during its lifetime.
class Tiles {
public:
    explicit Tiles(int rows) { shape(rows); }
    Tiles(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    void shape(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const int upper = std::min(rows, TILE_ROWS), lower = rows > upper ? rows - upper : upper;
        const int heights[8] = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS};
        Shapes shapes{};
        for (int i = 0; i < 8; i++) {
            shapes.rows[i] = uint8_t(heights[i]);
            shapes.bytes[i] = 64;
        }
        settle_memory();
        _tile_loadconfig(&shapes);
    }

private:
    struct alignas(64) Shapes {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16];
        uint8_t rows[16];
    };
    int rows_ = 0;
};

// Tiles 0 and 1 (lower: 2 and 3) += tile 4 (lower: 5) times the two tiles of a panel. The compiler needs literal
// numbers.
template <WeightKind KIND> inline void multiply_upper() {
    if constexpr (KIND == BF16S) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    } else if constexpr (KIND == WIDE_CODES) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
    } else {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
    }
}

template <WeightKind KIND> inline void multiply_lower() {
    if constexpr (KIND == BF16S) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    } else if constexpr (KIND == WIDE_CODES) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    } else {
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
}

template <Strip HOW> inline void load_upper(const char* strip) {
    if constexpr (HOW == Strip::STREAMED)
        _tile_stream_loadd(4, strip, 64);
    else
        _tile_loadd(4, strip, 64);
}

template <Strip HOW> inline void load_lower(const char* strip) {
    if constexpr (HOW == Strip::STREAMED)
        _tile_stream_loadd(5, strip, 64);
    else
        _tile_loadd(5, strip, 64);
}

// sums[row][PANEL] = a strip of up to TILE_STRIP rows times a panel, over `row_bytes` of each row. Meanwhile prefetches
// `lines` cache lines, from `ahead` on, for every 64 bytes of a row, and calls between().
template <WeightKind KIND, Strip HOW, class Between>
inline void multiply_tiles(const char* strip, int rows, const char* panel, int64_t row_bytes, char* sums, const char* ahead, int lines,
                           const Between& between) {
    constexpr int ROW = PANEL * 4;  // bytes per row of a panel, and of sums
    const bool is_tall = rows > TILE_ROWS;
    settle_memory();
    _tile_zero(0);
    _tile_zero(1);
    if (is_tall) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t at = 0; at < row_bytes; at += 64, strip += 64 * rows, panel += TILE_ROWS * ROW) {
        int left = lines;
        const auto bring = [&](int most) {
            for (; most > 0 && left > 0; most--, left--, ahead += 64) __builtin_prefetch(ahead);
        };
        bring(PACE);
        _tile_loadd(6, panel, ROW);
        bring(PACE);
        _tile_loadd(7, panel + 64, ROW);
        bring(PACE);
        load_upper<HOW>(strip);
        bring(PACE);
        multiply_upper<KIND>();
        if (is_tall) {
            load_lower<HOW>(strip + 64 * TILE_ROWS);
            multiply_lower<KIND>();
        }
        bring(lines);
        between();
    }
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + 64, ROW);
    if (is_tall) {
        _tile_stored(2, sums + TILE_ROWS * ROW, ROW);
        _tile_stored(3, sums + TILE_ROWS * ROW + 64, ROW);
    }
}

// As multiply_tiles, for up to TILE_ROWS rows and two panels `apart` bytes from each other: two streams get more out of
// memory than one.
template <WeightKind KIND>
void multiply_two(const char* strip, int rows, const char* panel, int64_t apart, int64_t row_bytes, char* sums, int64_t ahead) {
    constexpr int ROW = PANEL * 4;
    settle_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = 0; at < row_bytes; at += 64, strip += 64 * rows, panel += TILE_ROWS * ROW) {
        const auto bring = [&](int part) {
#pragma GCC unroll 4
            for (int i = part * 256; i < part * 256 + 256; i += 64) {
                __builtin_prefetch(panel + ahead + i);
                __builtin_prefetch(panel + apart + ahead + i);
            }
        };
        _tile_loadd(4, strip, 64);
        bring(0);
        _tile_loadd(5, strip, 64);
        bring(1);
        _tile_loadd(6, panel, ROW);
        bring(2);
        _tile_loadd(7, panel + 64, ROW);
        bring(3);
        multiply_upper<KIND>();
        bring(4);
        _tile_loadd(6, panel + apart, ROW);
        bring(5);
        _tile_loadd(7, panel + apart + 64, ROW);
        bring(6);
        multiply_lower<KIND>();
        bring(7);
    }
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + 64, ROW);
    _tile_stored(2, sums + TILE_ROWS * ROW, ROW);
    _tile_stored(3, sums + TILE_ROWS * ROW + 64, ROW);
}

#else

inline bool has_tiles() { return false; }

struct Tiles {
    explicit Tiles(int) {}
    void shape(int) {}
};

template <WeightKind KIND, Strip HOW, class Between>
void multiply_tiles(const char*, int, const char*, int64_t, char*, const char*, int, const Between&) {}
template <WeightKind KIND> void multiply_two(const char*, int, const char*, int64_t, int64_t, char*, int64_t) {}

#endif

// Combines integer sums of the rows' upper planes, then of their lower ones, into float32 sums of their codes.
// `middles`: the excess of each output in both, or null.
inline void join_planes(float* sums, int rows, const vi* middles = nullptr) {
    for (int i = 0; i < rows * PANEL_VECS; i++, sums += W) {
        vi upper = load_as<vi>(sums), lower = load_as<vi>(sums + rows * PANEL);
        if (middles) upper -= middles[i % PANEL_VECS], lower -= middles[i % PANEL_VECS];
        store(sums, __builtin_convertvector(upper, vf) * 256.0f + __builtin_convertvector(lower, vf));
    }
}

}  // namespace mooncake
