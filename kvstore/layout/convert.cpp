// Rows of KV from one type of number to another, or as they are, in one pass over memory. kvstore/layout/convert.py is the
// definition. A row of int8 is its steps and a float32, their scale.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../copy.h"

namespace {

enum Type : int64_t { kFloat32, kBFloat16, kInt8, kTypes };

constexpr int64_t kNumberBytes[] = {4, 2, 1}, kScaleBytes[] = {0, 0, 4};

constexpr int64_t row_bytes(int64_t type, int64_t dim) { return kNumberBytes[type] * dim + kScaleBytes[type]; }

uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

template <typename T>
T at(const uint8_t *row, int64_t index) {
    T value;
    memcpy(&value, row + index * sizeof value, sizeof value);
    return value;
}

template <Type type>
float number(const uint8_t *row, int64_t index, float scale) {
    if constexpr (type == kFloat32) return at<float>(row, index);
    if constexpr (type == kBFloat16) return float_of((uint32_t)at<uint16_t>(row, index) << 16);
    if constexpr (type == kInt8) return at<int8_t>(row, index) * scale;
}

// To the nearest, ties to even; what is no number stays none.
uint16_t to_bfloat16(float value) {
    const uint32_t bits = bits_of(value), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return value == value ? rounded : bits >> 16 | 0x40;
}

// The least scale of 16 significant bits that brings the row into the range of int8.
template <Type from>
float least_scale(const uint8_t *row, int64_t dim, float scale) {
    uint32_t largest = 0;  // sizes of numbers are in the order of their bits
    for (int64_t i = 0; i < dim; ++i) largest = std::max(largest, bits_of(number<from>(row, i, scale)) & 0x7FFFFFFF);
    return float_of((bits_of(float_of(largest) / 127.0f) + 0xFF) & 0xFFFFFF00);
}

template <Type from, Type to>
void convert_rows(const uint8_t *__restrict in, uint8_t *__restrict out, int64_t dim, int64_t rows, const uint8_t *) {
    const int64_t in_bytes = row_bytes(from, dim), out_bytes = row_bytes(to, dim);
    for (; rows > 0; --rows, in += in_bytes, out += out_bytes) {
        float scale = 1;
        if constexpr (from == kInt8) memcpy(&scale, in + dim, 4);
        if constexpr (to == kInt8) {
            const float least = least_scale<from>(in, dim, scale), unit = least > 0 ? least : 1;
            for (int64_t i = 0; i < dim; ++i) out[i] = (int32_t)std::nearbyint(number<from>(in, i, scale) / unit);
            memcpy(out + dim, &least, 4);
        } else {
            for (int64_t i = 0; i < dim; ++i) {
                const float value = number<from>(in, i, scale);
                if constexpr (to == kFloat32) memcpy(out + 4 * i, &value, 4);
                const uint16_t half = to_bfloat16(value);
                if constexpr (to == kBFloat16) memcpy(out + 2 * i, &half, 2);
            }
        }
    }
}

template <Type type>
void copy_rows(const uint8_t *in, uint8_t *out, int64_t dim, int64_t rows, const uint8_t *next) {
    copying::past_caches(out, in, row_bytes(type, dim) * rows, next);
}

using Rows = void (*)(const uint8_t *, uint8_t *, int64_t, int64_t, const uint8_t *);
constexpr Rows kRows[kTypes][kTypes] = {
    {copy_rows<kFloat32>, convert_rows<kFloat32, kBFloat16>, convert_rows<kFloat32, kInt8>},
    {convert_rows<kBFloat16, kFloat32>, copy_rows<kBFloat16>, convert_rows<kBFloat16, kInt8>},
    {convert_rows<kInt8, kFloat32>, convert_rows<kInt8, kBFloat16>, copy_rows<kInt8>}};

}  // namespace

// Shape: layers, 2, heads, tokens; strides in bytes of its first three axes. Tokens lie behind one another, and where parts
// of an axis do, too, on both sides, they are a single run. The same for each of `count` boxes: `together` at a time, run
// by run in turns. Of boxes that lie beside one another a source is then read as it lies in memory.
extern "C" void convert(const uint8_t *const *sources, uint8_t *const *targets, int64_t count, int64_t together, int64_t from,
                        int64_t to, int64_t dim, const int64_t *shape, const int64_t *in, const int64_t *out) {
    int64_t rows = shape[3], axes = 3;
    const auto lie_together = [&](int64_t axis) {
        return shape[axis] == 1 || (in[axis] == rows * row_bytes(from, dim) && out[axis] == rows * row_bytes(to, dim));
    };
    for (; axes > 0 && lie_together(axes - 1); --axes) rows *= shape[axes - 1];
    int64_t runs = 1;
    for (int64_t axis = 0; axis < axes; ++axis) runs *= shape[axis];
    const auto offset = [&](int64_t run, const int64_t *strides) {
        int64_t bytes = 0;
        for (int64_t axis = axes - 1; axis >= 0; run /= shape[axis--]) bytes += run % shape[axis] * strides[axis];
        return bytes;
    };
    for (int64_t first = 0; first < count; first += together) {
        const int64_t end = first + together;
        for (int64_t i = 0; i < runs; ++i) {
            const int64_t there = offset(i, in), here = offset(i, out);
            const uint8_t *after = i + 1 < runs ? sources[first] + offset(i + 1, in) : sources[std::min(end, count - 1)];
            for (int64_t box = first; box < end; ++box) {
                const uint8_t *next = box + 1 < end ? sources[box + 1] + there : after;
                kRows[from][to](sources[box] + there, targets[box] + here, dim, rows, next);
            }
        }
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);  // streamed stores are not ordered with what is published after them
}
