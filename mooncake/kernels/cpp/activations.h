// Rows of activations in the form that a kind of packed weights is multiplied with: float32, or as narrow as the
// weights if the processor can multiply that.
#pragma once

#include <array>

#include "steps.h"
#include "tiles.h"

namespace mooncake {

constexpr int STRIP = W == 16 ? 12 : 6;  // rows multiplied at once in vectors: STRIP * PANEL_VECS accumulators
constexpr int MOST_GROUP = 128;           // inputs of a group of GROUPED_CODES; mirrored in grouped.py

// Bytes of a narrow row that are adjacent: a tile's row, or one lane. 0 for rows that stay float32.
inline int unit_of(int32_t kind) {
    if (kind == FLOATS || kind == CODES) return 0;
    if (kind == GROUPED_CODES) return 4;  // tiles would sum over 64 inputs, which are several groups
    if (has_tiles()) return ROW_UNIT;
    return kind == BF16S && !MULTIPLIES_BF16 ? 0 : 4;
}

// Divides rows into strips of limited height: of nearly equal height for vectors, of whole tiles for tiles.
struct Strips {
    int64_t rows, count;
    int tall;  // rows of each strip except the last, for tiles; otherwise 0

    Strips(int64_t rows, int most, bool is_tiled) : rows(rows), count((rows + most - 1) / most), tall(is_tiled ? most : 0) {}
    int64_t first(int64_t strip) const { return tall ? std::min(strip * tall, rows) : strip * rows / count; }
    int height(int64_t strip) const { return int(first(strip + 1) - first(strip)); }
};

// What precedes the codes of a group of activations, for each row.
struct GroupHead {
    float scale, sum;  // sum: of what the codes stand for
    int32_t start;     // minus the sum of the codes times the weights' middle: where integer sums begin
};

// Strip by strip: [inputs][rows] float32, or [row_bytes / unit][planes][rows][unit]. For GROUPED_CODES, group by group:
// [rows] GroupHeads, then [group / 4][rows][4].
struct Activations {
    Strips strips;
    int64_t row_bytes;  // of a plane
    int unit, planes;
    char* memory;
    float* row_scales;  // [rows], of codes

    char* strip(int64_t index) const { return memory + strips.first(index) * planes * row_bytes; }

    // For tiled rows: the address of byte `at` of a row.
    char* tile_row(int64_t row, int64_t at) const {
        const int64_t strip = row / TILE_STRIP, within = row % TILE_STRIP;
        return memory + strips.first(strip) * row_bytes + (at / ROW_UNIT * strips.height(strip) + within) * ROW_UNIT + at % ROW_UNIT;
    }
};

// ROWS rows, `stride` apart, as float32 [padded][ROWS].
template <int ROWS> void turn(const float* rows, int64_t stride, int64_t K, int64_t padded, float* out) {
    int64_t k = 0;
    for (; k + W <= K; k += W, out += W * ROWS) {
        float piece[ROWS][W];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) store(piece[r], load(rows + r * stride + k));
        for (int i = 0; i < W; i++)
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) out[i * ROWS + r] = piece[r][i];
    }
    for (; k < padded; k++)
        for (int r = 0; r < ROWS; r++) *out++ = k < K ? rows[r * stride + k] : 0.0f;
}

template <size_t... I> constexpr auto turns(std::index_sequence<I...>) {
    return std::array<void (*)(const float*, int64_t, int64_t, int64_t, float*), STRIP>{turn<int(I) + 1>...};
}

constexpr auto TURN = turns(std::make_index_sequence<STRIP>());

// W values of a row of K, with zeros past its end.
inline vf piece_of(const float* row, int64_t k, int64_t K) {
    if (k + W <= K) return load(row + k);
    vf piece{};
    std::memcpy(&piece, row + k, std::max<int64_t>(0, K - k) * sizeof(float));
    return piece;
}

// Bytes at `at` of a narrow row, in its strip of `rows` rows.
template <int UNIT, class T, size_t COUNT> inline void put_piece(const T (&piece)[COUNT], int64_t at, int rows, char* out) {
    constexpr int BYTES = int(sizeof(T) * COUNT), TOGETHER = BYTES < UNIT ? BYTES : UNIT;
#pragma GCC unroll 8
    for (int i = 0; i < BYTES; i += TOGETHER)
        std::memcpy(out + (at + i) / UNIT * UNIT * rows + (at + i) % UNIT, (const char*)piece + i, TOGETHER);
}

// NaN if one of them is not finite: codes cannot represent that, so their scale does.
inline float largest_magnitude(const float* row, int64_t K) {
    vf top{}, nothing{};
    for (int64_t k = 0; k < K; k += W) {
        const vf piece = piece_of(row, k, K);
        top = larger(top, magnitude(piece));
        nothing += piece * 0.0f;
    }
    return largest(top) + sum(nothing);
}

// One row as codes 1 .. 255 around 128 (the instructions need one unsigned side), scale = max|x| / 127.
template <int UNIT> float code_row(const float* row, int64_t K, int64_t padded, int rows, char* out) {
    const float scale = largest_magnitude(row, K) / 127.0f, divisor = scale > 0 ? scale : 1.0f;
    for (int64_t k = 0; k < padded; k += W) {
        uint8_t codes[W];
        store(codes, __builtin_convertvector(round_whole(piece_of(row, k, K) / divisor), vi) + 128);
        put_piece<UNIT>(codes, k, rows, out);
    }
    return scale;
}

// One row as 16-bit codes, scale = max|x| / MOST_WIDE: code = 256 upper + lower, each in its own plane. Both are signed
// in tiles; in lanes, whose instructions need one unsigned side, they are 0 .. 255 around 128.
constexpr float MOST_WIDE = 127 * 256 + 127;

template <int UNIT> float code_row_wide(const float* row, int64_t K, int64_t padded, int rows, char* out) {
    constexpr int MIDDLE = UNIT == ROW_UNIT ? 0 : 128;
    const float scale = largest_magnitude(row, K) / MOST_WIDE, divisor = scale > 0 ? scale : 1.0f;
    for (int64_t k = 0; k < padded; k += W) {
        const vi codes = __builtin_convertvector(round_whole(piece_of(row, k, K) / divisor), vi);
        const vi above = (codes + 128) >> 8;
        uint8_t upper[W], lower[W];
        store(upper, above + MIDDLE);
        store(lower, codes - (above << 8) + MIDDLE);
        put_piece<UNIT>(upper, k, 2 * rows, out);
        put_piece<UNIT>(lower, k, 2 * rows, out + rows * UNIT);
    }
    return scale;
}

// One row as int8 codes, with a scale = max|x| / 127 for each group.
inline void code_row_in_groups(const PackedLinear& layer, const float* row, int rows, int at, char* out) {
    alignas(64) uint8_t codes[MOST_GROUP + W];
    for (int64_t first = 0; first < layer.inputs; first += layer.group, row += layer.group) {
        const float scale = largest_magnitude(row, layer.group) / 127.0f, divisor = scale > 0 ? scale : 1.0f;
        vf total{};
        for (int64_t k = 0; k < layer.group; k += W) {
            const vf whole = round_whole(piece_of(row, k, layer.group) / divisor);
            total += whole;
            store(codes + k, __builtin_convertvector(whole, vi));
        }
        const float sum_of_codes = sum(total);  // exact: whole numbers below 2^24
        // Of a group that is not finite the scale is NaN, and so is all that is multiplied with it.
        const int32_t middles = scale == scale ? -layer.middle * int32_t(sum_of_codes) : 0;
        const GroupHead head{scale, scale * sum_of_codes, middles};
        std::memcpy(out + at * sizeof head, &head, sizeof head);
        out += rows * sizeof head;
        for (int64_t k = 0; k < layer.group; k += 4, out += rows * 4) std::memcpy(out + at * 4, codes + k, 4);
    }
}

// One row as bfloat16.
template <int UNIT> void narrow_row(const float* row, int64_t K, int64_t padded, int rows, char* out) {
    for (int64_t k = 0; k < padded; k += W) {
        bf16 narrow[W];
        store(narrow, piece_of(row, k, K));
        put_piece<UNIT>(narrow, k * int64_t(sizeof(bf16)), rows, out);
    }
}

// Bytes of a row, or of each of its planes.
inline int64_t activation_bytes(const PackedLinear& layer) {
    if (layer.kind == GROUPED_CODES) return layer.inputs + layer.inputs / layer.group * int64_t(sizeof(GroupHead));
    return unit_of(layer.kind) ? layer.row_bytes() : layer.padded() * 4;
}

// Bytes needed for `rows` rows of activations for `layer`.
inline int64_t room_bytes(const PackedLinear& layer, int64_t rows) {
    const int64_t row_bytes = activation_bytes(layer);
    return rows * (layer.kind == WIDE_CODES ? 2 : 1) * row_bytes + rows * 4 + 128;
}

// Takes the activations from memory that was started with enough room.
inline Activations take_room(const PackedLinear& layer, int64_t rows, Scratch& memory) {
    const int unit = unit_of(layer.kind);
    const int planes = layer.kind == WIDE_CODES ? 2 : 1;
    const int64_t row_bytes = activation_bytes(layer);
    const bool is_tiled = unit == ROW_UNIT;
    Activations out{Strips(rows, (is_tiled ? TILE_STRIP : STRIP) / planes, is_tiled), row_bytes, unit, planes, nullptr, nullptr};
    out.memory = memory.take<char>(rows * planes * row_bytes);
    out.row_scales = memory.take<float>(rows);
    return out;
}

// Room for `rows` rows of activations for `layer`. The caller keeps `memory`.
inline Activations room_for(const PackedLinear& layer, int64_t rows, Scratch& memory) {
    memory.start<char>(room_bytes(layer, rows));
    return take_room(layer, rows, memory);
}

// Fills a strip with rows, `stride` apart from `rows_at` on, as activations for `layer`; normalised first if `norm` is
// given.
inline void fill_strip(const PackedLinear& layer, const Activations& out, int64_t strip, const float* rows_at, int64_t stride,
                       const float* norm, float eps) {
    static thread_local Scratch normed;
    const int64_t K = layer.inputs, padded = layer.padded(), first = out.strips.first(strip);
    const int unit = out.unit, height = out.strips.height(strip);
    if (norm || layer.hadamard > 1) {
        float* to = normed.start(height * K);
        for (int r = 0; r < height; r++) {
            if (norm)
                normalise(rows_at + r * stride, norm, to + r * K, int(K), eps);
            else
                std::memcpy(to + r * K, rows_at + r * stride, K * sizeof(float));
            hadamard(to + r * K, K, layer.hadamard);
        }
        rows_at = to;
        stride = K;
    }
    char* to = out.strip(strip);
    if (!unit) return TURN[height - 1](rows_at, stride, K, padded, (float*)to);
    if (layer.kind == GROUPED_CODES) {
        for (int r = 0; r < height; r++) code_row_in_groups(layer, rows_at + r * stride, height, r, to);
        return;
    }
    for (int r = 0; r < height; r++, rows_at += stride, to += unit) {
        if (layer.kind == BF16S)
            (unit == ROW_UNIT ? narrow_row<ROW_UNIT> : narrow_row<4>)(rows_at, K, padded, height, to);
        else if (layer.kind == WIDE_CODES)
            out.row_scales[first + r] =
                (unit == ROW_UNIT ? code_row_wide<ROW_UNIT> : code_row_wide<4>)(rows_at, K, padded, height, to);
        else
            out.row_scales[first + r] = (unit == ROW_UNIT ? code_row<ROW_UNIT> : code_row<4>)(rows_at, K, padded, height, to);
    }
}

// `rows` rows of `from`, prepared by `fill_strip`.
inline Activations prepare(const PackedLinear& layer, const float* from, int64_t stride, int64_t rows, const float* norm,
                           float eps, Scratch& memory, int threads) {
    const Activations out = room_for(layer, rows, memory);
    parallel(out.strips.count, rows * layer.inputs < (1 << 15) ? 1 : threads, [&](int64_t strip) {
        fill_strip(layer, out, strip, from + out.strips.first(strip) * stride, stride, norm, eps);
    });
    return out;
}

}  // namespace mooncake
