// The functions of reference.py for CPUs: paged attention that reads pages where they lie, and the small fused steps
// around it. Letters for shapes are those of reference.py. A plain C interface (pointers, strides in elements, int status),
// so that it compiles in seconds and depends on no version of torch.
//
// Vectors are GCC's vector extension, as wide as the machine has: the same source gives AVX-512, AVX2, SSE and NEON.
//
// Two ways through attention, chosen by how many query rows (tokens times G) read the same keys:
//   few rows (decode)   `attend_dots`   lanes run over D: K and V stream by once, each page row is used G times from registers
//   many rows (chunks)  `attend_lanes`  lanes run over query rows: all of scores, softmax and mixing is vertical, K and V are
//                                       read by broadcast, in place, and stay in L1 for all rows of a query block
// Long contexts are cut into parts whose borders depend on the sequence alone, never on threads or batch; whoever finishes
// a row's last part merges them in order. So a result does not depend on the number of threads or on the neighbours.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <omp.h>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;        // floats in a vector
constexpr int LANE_VECS = 4; // vectors of query rows that one pass of attend_lanes holds
constexpr int DOT_ROWS = 4;  // query rows that one pass of attend_dots mixes
#elif defined(__AVX__)
constexpr int W = 8;
constexpr int LANE_VECS = 2;
constexpr int DOT_ROWS = 2;
#else
constexpr int W = 4;
constexpr int LANE_VECS = 2;
constexpr int DOT_ROWS = 2;
#endif

constexpr int LANES = W * LANE_VECS;    // query rows in one row block of attend_lanes
constexpr int BLOCK_ROWS = 128;         // query rows that share a pass over K and V, where G allows
constexpr int TILE = 32;                // tokens of K and V that stay in L1 between uses
constexpr int FEW_ROWS = 16;            // up to here attend_dots is faster; measured
constexpr int DOT_PART = 256;           // tokens of context in a part, at least
constexpr int LANE_PART = 2048;
constexpr int MAX_DOT_PARTS = 64;       // bounds the memory for unmerged parts
constexpr int MAX_LANE_PARTS = 8;
constexpr float NEVER = -1e30f;         // score of a token that must not be seen; finite, so that differences are numbers

enum Status { OK = 0, BAD_BLOCK = 1, BAD_POSITION = 2 };

using vf = float __attribute__((vector_size(W * 4)));
using vi = int32_t __attribute__((vector_size(W * 4)));
using vu = uint32_t __attribute__((vector_size(W * 4)));
using vh = uint16_t __attribute__((vector_size(W * 2)));

struct bf16 {
    uint16_t bits;
};

inline vf load(const float* from) {
    vf v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline vf load(const bf16* from) {
    vh half;
    std::memcpy(&half, from, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}

inline void store(float* to, vf v) { std::memcpy(to, &v, sizeof v); }

inline void store(bf16* to, vf v) {  // round to nearest, ties to even; NaN stays NaN
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = v != v ? (bits >> 16 | 0x40) : rounded;
    vh half = __builtin_convertvector(rounded, vh);
    std::memcpy(to, &half, sizeof half);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}

template <class T> T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline vf splat(float x) { return x - vf{}; }
inline vf larger(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf v) {
    float total = 0;
    for (int i = 0; i < W; i++) total += v[i];
    return total;
}

inline float largest(vf v) {
    float most = v[0];
    for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// 2^(whole + f) for whole an integer in [-126, 126] and |f| ≤ 1/2; relative error 2e-9 plus rounding.
inline vf exp2_parts(vf whole, vf f) {
    vf p = splat(1.53458116e-4f);
    p = p * f + 1.33999312e-3f;
    p = p * f + 9.61848896e-3f;
    p = p * f + 5.55032878e-2f;
    p = p * f + 2.40226469e-1f;
    p = p * f + 6.93147206e-1f;
    p = p * f + 1.0f;
    vi exponent = (__builtin_convertvector(whole, vi) + 127) << 23;
    return p * (vf)exponent;
}

inline vf round_whole(vf x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: nothing behind the point survives adding it
    return (x + magic) - magic;
}

// 2^x for x ≤ 0; exactly 1 at 0 and exactly 0 below -126.
inline vf exp2v(vf x) {
    vf inside = larger(x, splat(-126.0f));
    vf whole = round_whole(inside);
    return x < -126.0f ? vf{} : exp2_parts(whole, inside - whole);
}

inline float exp2s(float x) { return exp2v(splat(x))[0]; }

// e^x within the range of normal numbers, saturating outside.
inline vf expv(vf x) {
    vf inside = larger(x, splat(-87.0f));
    inside = inside > 87.0f ? splat(87.0f) : inside;
    vf whole = round_whole(inside * 1.44269504f);
    vf f = (inside * 1.44269504f - whole) + inside * 1.92596299e-8f;  // log2(e) in two pieces
    return exp2_parts(whole, f);
}

// ---- pages ----------------------------------------------------------------------------------------------------------

// One layer of the paged cache; strides in elements, D elements of a token are adjacent, tokens follow each other.
template <class T> struct Pages {
    const T* base;
    int64_t block_stride, kv_stride, head_stride;
    int block_tokens, head_dim;

    // Addresses of K (kv = 0) or V (kv = 1) of tokens first .. first + count of one sequence.
    void rows(const int32_t* table, int head, int kv, int first, int count, const T** out) const {
        int block = first / block_tokens, offset = first % block_tokens;
        const T* head_base = base + kv * kv_stride + head * head_stride;
        for (int i = 0; i < count;) {
            const T* row = head_base + table[block] * block_stride + int64_t(offset) * head_dim;
            int run = std::min(block_tokens - offset, count - i);
            for (int j = 0; j < run; j++, row += head_dim) out[i + j] = row;
            i += run;
            block++;
            offset = 0;
        }
    }
};

// ---- the work list --------------------------------------------------------------------------------------------------

struct AttentionCall {
    const void* query;
    int64_t query_stride;  // from token to token; heads of a token are adjacent
    void* output;          // [T, Hq, D], contiguous
    const int32_t *block_tables, *query_starts, *context_lens;
    int64_t table_stride;
    int num_heads, group, head_dim, window;
    float scale_log2;  // scale * log2(e)

    int tokens(int seq) const { return query_starts[seq + 1] - query_starts[seq]; }

    // Where in its sequence the token of a query row is.
    int position(int seq, int row) const { return context_lens[seq] - tokens(seq) + row / group; }

    // Index of a query row among all [T * Hq] rows.
    int64_t row_index(int seq, int kv_head, int row) const {
        return (query_starts[seq] + int64_t(row / group)) * num_heads + kv_head * group + row % group;
    }

    template <class T> const T* query_row(int seq, int kv_head, int row) const {
        return (const T*)query + (query_starts[seq] + row / group) * query_stride + (kv_head * group + row % group) * head_dim;
    }
};

// Query rows first .. first + count of sequence `seq` against context tokens begin .. end, for one KV head. Row r is query
// head r % G of the group, of the sequence's query token r / G: so rows pack vectors fully, whatever G is.
struct Item {
    int seq, kv_head, first, count, begin, end;
    int merge;  // index of the Merge it is a part of, or -1 when it is alone
    int part;
};

// Parts of the same query rows. Part p has its unnormalised output [rows, D] at floats + p * stride, then rows of
// largest scores, then rows of sums.
struct Merge {
    int64_t offset, stride;
    int parts;
};

struct WorkList {
    std::vector<Item> items;
    std::vector<Merge> merges;
    int64_t merge_floats = 0;
    int64_t cost = 0;  // multiply-adds / D

    void add(Item item, int head_dim, int least_part, int most_parts) {
        int length = item.end - item.begin;
        int part_len = std::max(least_part, (length + most_parts - 1) / most_parts);
        part_len = (part_len + TILE - 1) / TILE * TILE;
        int parts = (length + part_len - 1) / part_len;
        item.merge = -1;
        item.part = 0;
        cost += int64_t(item.count) * length;
        if (parts == 1) {
            items.push_back(item);
            return;
        }
        int64_t stride = int64_t(item.count) * (head_dim + 2);
        item.merge = int(merges.size());
        merges.push_back({merge_floats, stride, parts});
        merge_floats += stride * parts;
        const int begin = item.begin, end = item.end;
        for (int part = 0; part < parts; part++) {
            item.part = part;
            item.begin = begin + part * part_len;
            item.end = std::min(end, item.begin + part_len);
            items.push_back(item);
        }
    }
};

void plan(const AttentionCall& call, int num_sequences, int num_kv_heads, WorkList& list) {
    for (int seq = 0; seq < num_sequences; seq++) {
        const int tokens = call.tokens(seq), rows = tokens * call.group;
        const bool few = rows <= FEW_ROWS;
        for (int first = 0; first < rows; first += BLOCK_ROWS) {
            const int count = std::min(BLOCK_ROWS, rows - first);
            const int begin = call.window ? std::max(0, call.position(seq, first) - call.window + 1) : 0;
            Item item{seq, 0, first, count, begin, call.position(seq, first + count - 1) + 1, -1, 0};
            for (int head = 0; head < num_kv_heads; head++) {
                item.kv_head = head;
                list.add(item, call.head_dim, few ? DOT_PART : LANE_PART, few ? MAX_DOT_PARTS : MAX_LANE_PARTS);
            }
        }
    }
    // Long items first, so that the last ones to finish are short.
    std::sort(list.items.begin(), list.items.end(), [](const Item& a, const Item& b) {
        return int64_t(a.count) * (a.end - a.begin) > int64_t(b.count) * (b.end - b.begin);
    });
}

// ---- results --------------------------------------------------------------------------------------------------------

template <class T> struct Results {
    const AttentionCall& call;
    const WorkList& list;
    float* partial;
    std::atomic<int>* missing;  // one a merge

    T* output_row(const Item& item, int row) const {
        return (T*)call.output + call.row_index(item.seq, item.kv_head, item.first + row) * call.head_dim;
    }

    // `mixed` is [rows, D], not yet divided by `sums`; scores are in log2.
    void put(const Item& item, const float* mixed, const float* most, const float* sums) const {
        const int rows = item.count, D = call.head_dim;
        if (item.merge < 0) {
            for (int row = 0; row < rows; row++) {
                T* out = output_row(item, row);
                const float inverse = 1.0f / sums[row];
                for (int d = 0; d < D; d += W) store(out + d, load(mixed + row * D + d) * inverse);
            }
            return;
        }
        const Merge& merge = list.merges[item.merge];
        float* mine = partial + merge.offset + merge.stride * item.part;
        std::memcpy(mine, mixed, sizeof(float) * rows * D);
        std::memcpy(mine + rows * D, most, sizeof(float) * rows);
        std::memcpy(mine + rows * (D + 1), sums, sizeof(float) * rows);
        if (missing[item.merge].fetch_sub(1, std::memory_order_acq_rel) == 1) join(item, merge, rows);
    }

    void join(const Item& item, const Merge& merge, int rows) const {
        const int D = call.head_dim;
        const float* parts = partial + merge.offset;
        std::vector<float> weights(merge.parts);
        for (int row = 0; row < rows; row++) {
            float most = NEVER, total = 0;
            for (int p = 0; p < merge.parts; p++) most = std::max(most, parts[p * merge.stride + rows * D + row]);
            for (int p = 0; p < merge.parts; p++) {
                weights[p] = exp2s(parts[p * merge.stride + rows * D + row] - most);
                total += weights[p] * parts[p * merge.stride + rows * (D + 1) + row];
            }
            T* out = output_row(item, row);
            for (int d = 0; d < D; d += W) {
                vf acc{};
                for (int p = 0; p < merge.parts; p++) acc += load(parts + p * merge.stride + row * D + d) * weights[p];
                store(out + d, acc * (1.0f / total));
            }
        }
    }
};

// Memory of one thread for one item, kept between calls.
struct Scratch {
    std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};
    int64_t capacity = 0, used = 0;

    void start(int64_t floats) {
        used = 0;
        if (floats <= capacity) return;
        capacity = (floats + 1023) / 1024 * 1024;
        memory.reset((float*)std::aligned_alloc(64, capacity * sizeof(float)));
    }

    float* take(int64_t floats) {
        float* place = memory.get() + used;
        used += (floats + 15) / 16 * 16;
        return place;
    }
};

// ---- few query rows: lanes over D -----------------------------------------------------------------------------------

// Lane numbers that pair up, inside segments of SEG lanes, the halves of two vectors: UPPER says which halves.
template <int SEG, bool UPPER, size_t... LANE> constexpr vi halves(std::index_sequence<LANE...>) {
    constexpr int half = SEG / 2;
    return vi{int(LANE / half / 2 * SEG + LANE % half + (LANE / half % 2 ? W : 0) + (UPPER ? half : 0))...};
}

// The W sums over lanes of W vectors, as one vector: a tree in which each step halves the vectors.
template <int SEG = W> inline vf sums_of(vf* v) {
    if constexpr (SEG == 1) {
        return v[0];
    } else {
        constexpr auto lanes = std::make_index_sequence<W>();
#pragma GCC unroll 16
        for (int i = 0; i < SEG / 2; i++) {
            vf lower = __builtin_shuffle(v[i], v[i + SEG / 2], halves<SEG, false>(lanes));
            vf upper = __builtin_shuffle(v[i], v[i + SEG / 2], halves<SEG, true>(lanes));
            v[i] = lower + upper;
        }
        return sums_of<SEG / 2>(v);
    }
}

// scores[0 .. W) of one query row against W keys.
template <class T> inline vf dots(const float* query, const T* const* keys, int D) {
    vf acc[W];
    {
        vf q = load(query);
#pragma GCC unroll 16
        for (int t = 0; t < W; t++) acc[t] = q * load(keys[t]);
    }
    for (int d = W; d < D; d += W) {
        vf q = load(query + d);
#pragma GCC unroll 16
        for (int t = 0; t < W; t++) acc[t] += q * load(keys[t] + d);
    }
    return sums_of(acc);
}

// mixed[row][d .. d + VECS * W) += sum over tokens of scores[row][t] * values[t], for ROWS rows.
template <int ROWS, int VECS, class T>
inline void mix_rows(const float* scores, int64_t score_stride, const T* const* values, int count, int d, float* mixed, int D) {
    vf acc[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) acc[r][v] = load(mixed + r * D + d + v * W);
    for (int t = 0; t < count; t++) {
        const T* value = values[t] + d;
        vf loaded[VECS];
        for (int v = 0; v < VECS; v++) loaded[v] = load(value + v * W);
        for (int r = 0; r < ROWS; r++) {
            const float p = scores[r * score_stride + t];
            for (int v = 0; v < VECS; v++) acc[r][v] += loaded[v] * p;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECS; v++) store(mixed + r * D + d + v * W, acc[r][v]);
}

template <int ROWS, class T>
inline void mix(const float* scores, int64_t score_stride, const T* const* values, int count, float* mixed, int D) {
    int d = 0;
    for (; d + 4 * W <= D; d += 4 * W) mix_rows<ROWS, 4>(scores, score_stride, values, count, d, mixed, D);
    for (; d + 2 * W <= D; d += 2 * W) mix_rows<ROWS, 2>(scores, score_stride, values, count, d, mixed, D);
    for (; d < D; d += W) mix_rows<ROWS, 1>(scores, score_stride, values, count, d, mixed, D);
}

template <class T>
void attend_dots(const AttentionCall& call, const Pages<T>& pages, const Item& item, const Results<T>& results, Scratch& scratch) {
    const int D = call.head_dim, rows = item.count, length = item.end - item.begin;
    const int64_t width = (length + W - 1) / W * W;
    const int32_t* table = call.block_tables + item.seq * call.table_stride;
    scratch.start(int64_t(rows) * (2 * D + width) + 2 * rows + 64);
    float *query = scratch.take(rows * D), *mixed = scratch.take(rows * D), *scores = scratch.take(rows * width);
    float *most = scratch.take(rows), *sums = scratch.take(rows);
    for (int row = 0; row < rows; row++) {
        const T* from = call.query_row<T>(item.seq, item.kv_head, item.first + row);
        for (int d = 0; d < D; d += W) store(query + row * D + d, load(from + d) * call.scale_log2);
    }

    const T* tile[std::max(TILE, W)];
    for (int at = 0; at < length; at += W) {
        const int count = std::min(W, length - at);
        pages.rows(table, item.kv_head, 0, item.begin + at, count, tile);
        for (int t = count; t < W; t++) tile[t] = tile[0];
        for (int row = 0; row < rows; row++) store(scores + row * width + at, dots(query + row * D, tile, D));
    }

    for (int row = 0; row < rows; row++) {
        const int position = call.position(item.seq, item.first + row);
        const int stop = std::min(length, position + 1 - item.begin);
        const int start = call.window ? std::max(0, position + 1 - call.window - item.begin) : 0;
        float* line = scores + row * width;
        for (int t = 0; t < std::min(start, length); t++) line[t] = NEVER;
        for (int64_t t = std::max(stop, 0); t < width; t++) line[t] = NEVER;
        vf top = splat(NEVER), total{};
        for (int t = 0; t < width; t += W) top = larger(top, load(line + t));
        most[row] = largest(top);
        for (int t = 0; t < width; t += W) {
            vf p = exp2v(load(line + t) - most[row]);
            store(line + t, p);
            total += p;
        }
        sums[row] = sum(total);
    }

    std::memset(mixed, 0, sizeof(float) * rows * D);
    for (int at = 0; at < length; at += TILE) {
        const int count = std::min(TILE, length - at);
        pages.rows(table, item.kv_head, 1, item.begin + at, count, tile);
        int row = 0;
        for (; row + DOT_ROWS <= rows; row += DOT_ROWS)
            mix<DOT_ROWS>(scores + row * width + at, width, tile, count, mixed + row * D, D);
        for (; row + 3 <= rows; row += 3) mix<3>(scores + row * width + at, width, tile, count, mixed + row * D, D);
        for (; row + 2 <= rows; row += 2) mix<2>(scores + row * width + at, width, tile, count, mixed + row * D, D);
        for (; row < rows; row++) mix<1>(scores + row * width + at, width, tile, count, mixed + row * D, D);
    }
    results.put(item, mixed, most, sums);
}

// ---- many query rows: lanes over rows -------------------------------------------------------------------------------

// As attend_lanes needs them: float32 rows. float32 pages are used where they lie, bfloat16 ones are widened into `wide`.
inline void float_rows(const float* const* rows, int count, int, float*, const float** out) {
    std::copy(rows, rows + count, out);
}

inline void float_rows(const bf16* const* rows, int count, int D, float* wide, const float** out) {
    for (int t = 0; t < count; t++, wide += D) {
        for (int d = 0; d < D; d += W) store(wide + d, load(rows[t] + d));
        out[t] = wide;
    }
}

// scores[t][lane] = sum over d of keys[t][d] * query[d][lane], for 4 keys.
inline void score_four(const float* query, const float* const* keys, int D, float* scores) {
    vf acc[4][LANE_VECS] = {};
    for (int d = 0; d < D; d++) {
        for (int v = 0; v < LANE_VECS; v++) {
            vf q = load(query + d * LANES + v * W);
            for (int t = 0; t < 4; t++) acc[t][v] += q * keys[t][d];
        }
    }
    for (int t = 0; t < 4; t++)
        for (int v = 0; v < LANE_VECS; v++) store(scores + t * LANES + v * W, acc[t][v]);
}

// mixed[d][lane] = mixed[d][lane] * fade[lane] + sum over t of values[t][d] * scores[t][lane], for 4 of d.
inline void mix_four(const float* scores, const float* const* values, int count, int d, const vf* fade, float* mixed) {
    vf acc[4][LANE_VECS];
    for (int i = 0; i < 4; i++)
        for (int v = 0; v < LANE_VECS; v++) acc[i][v] = load(mixed + (d + i) * LANES + v * W) * fade[v];
    for (int t = 0; t < count; t++) {
        const float* value = values[t] + d;
        for (int v = 0; v < LANE_VECS; v++) {
            vf p = load(scores + t * LANES + v * W);
            for (int i = 0; i < 4; i++) acc[i][v] += p * value[i];
        }
    }
    for (int i = 0; i < 4; i++)
        for (int v = 0; v < LANE_VECS; v++) store(mixed + (d + i) * LANES + v * W, acc[i][v]);
}

// Up to LANES query rows, transposed, with the running state of their softmax.
struct RowBlock {
    float *query, *mixed;     // [D][LANES]
    float *most, *sums;       // [LANES]
    int32_t* position;        // [LANES]; of padding, that of the last real row
    int first_position, last_position;
};

inline void attend_tile(const RowBlock& rows, const float* const* keys, const float* const* values, int begin, int count,
                        int window, int D, float* scores) {
    for (int t = 0; t < count; t += 4) score_four(rows.query, keys + t, D, scores + t * LANES);
    const bool future = begin + count - 1 > rows.first_position;
    const bool past = window && begin <= rows.last_position - window;
    vf fade[LANE_VECS];
    for (int v = 0; v < LANE_VECS; v++) {
        float* column = scores + v * W;
        if (future || past) {
            vi position;
            std::memcpy(&position, rows.position + v * W, sizeof position);
            for (int t = 0; t < count; t++) {
                vi hidden = position < begin + t;
                if (window) hidden |= position >= begin + t + window;
                store(column + t * LANES, hidden ? splat(NEVER) : load(column + t * LANES));
            }
        }
        const vf before = load(rows.most + v * W);
        vf most = before;
        for (int t = 0; t < count; t++) most = larger(most, load(column + t * LANES));
        fade[v] = exp2v(before - most);
        vf total = load(rows.sums + v * W) * fade[v];
        for (int t = 0; t < count; t++) {
            vf p = exp2v(load(column + t * LANES) - most);
            store(column + t * LANES, p);
            total += p;
        }
        store(rows.most + v * W, most);
        store(rows.sums + v * W, total);
    }
    for (int d = 0; d < D; d += 4) mix_four(scores, values, count, d, fade, rows.mixed);
}

template <class T>
void attend_lanes(const AttentionCall& call, const Pages<T>& pages, const Item& item, const Results<T>& results, Scratch& scratch) {
    const int D = call.head_dim, rows = item.count, num_blocks = (rows + LANES - 1) / LANES;
    const int32_t* table = call.block_tables + item.seq * call.table_stride;
    scratch.start(int64_t(num_blocks) * LANES * (2 * D + 3) + TILE * (LANES + 2 * D) + int64_t(rows) * D + 64);
    float *scores = scratch.take(TILE * LANES), *wide_keys = scratch.take(TILE * D), *wide_values = scratch.take(TILE * D);
    const int64_t area = int64_t(num_blocks) * LANES;
    float *queries = scratch.take(area * D), *mixed = scratch.take(area * D);
    float *most = scratch.take(area), *sums = scratch.take(area);
    int32_t* positions = (int32_t*)scratch.take(area);

    for (int row = 0; row < area; row++) {
        const int real = item.first + std::min(row, rows - 1);
        positions[row] = call.position(item.seq, real);
        most[row] = NEVER;
        sums[row] = 0;
        float* column = queries + int64_t(row / LANES) * LANES * D + row % LANES;
        const T* from = call.query_row<T>(item.seq, item.kv_head, real);
        for (int d = 0; d < D; d++) column[d * LANES] = row < rows ? to_float(from[d]) * call.scale_log2 : 0;
    }
    std::memset(mixed, 0, sizeof(float) * area * D);

    const T* pointers[TILE];
    const float *keys[TILE + 3], *values[TILE];
    for (int at = item.begin; at < item.end; at += TILE) {
        const int count = std::min(TILE, item.end - at);
        pages.rows(table, item.kv_head, 0, at, count, pointers);
        float_rows(pointers, count, D, wide_keys, keys);
        for (int t = count; t % 4; t++) keys[t] = keys[0];  // scored and ignored
        pages.rows(table, item.kv_head, 1, at, count, pointers);
        float_rows(pointers, count, D, wide_values, values);
        for (int block = 0; block < num_blocks; block++) {
            const int64_t from = int64_t(block) * LANES;
            RowBlock part{queries + from * D, mixed + from * D, most + from, sums + from, positions + from,
                          positions[from], positions[from + LANES - 1]};
            if (at > part.last_position) continue;
            if (call.window && at + count <= part.first_position - call.window + 1) continue;
            attend_tile(part, keys, values, at, count, call.window, D, scores);
        }
    }

    float* turned = queries;  // no longer needed
    for (int row = 0; row < rows; row++) {
        const float* column = mixed + int64_t(row / LANES) * LANES * D + row % LANES;
        for (int d = 0; d < D; d++) turned[int64_t(row) * D + d] = column[d * LANES];
    }
    results.put(item, turned, most, sums);
}

template <class T> int attend(const AttentionCall& call, const Pages<T>& pages, int num_sequences, int num_kv_heads, int threads) {
    static thread_local WorkList list;
    static thread_local Scratch partial;
    static thread_local std::vector<std::atomic<int>> missing;
    list.items.clear();
    list.merges.clear();
    list.merge_floats = list.cost = 0;
    plan(call, num_sequences, num_kv_heads, list);
    partial.start(list.merge_floats);
    if (missing.size() < list.merges.size()) missing = std::vector<std::atomic<int>>(2 * list.merges.size());
    for (size_t i = 0; i < list.merges.size(); i++) missing[i].store(list.merges[i].parts, std::memory_order_relaxed);
    const Results<T> results{call, list, partial.memory.get(), missing.data()};
    const Item* items = list.items.data();
    const int count = int(list.items.size());
    const int team = list.cost * call.head_dim < (1 << 18) ? 1 : std::min(threads, count);
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int i = 0; i < count; i++) {
        static thread_local Scratch scratch;
        if (call.tokens(items[i].seq) * call.group <= FEW_ROWS)
            attend_dots(call, pages, items[i], results, scratch);
        else
            attend_lanes(call, pages, items[i], results, scratch);
    }
    return OK;
}

// ---- the steps around attention -------------------------------------------------------------------------------------

template <class T> inline void normalise(const T* from, const T* weight, T* to, int count, float eps) {
    vf squares{};
    int i = 0;
    for (; i + W <= count; i += W) {
        vf x = load(from + i);
        squares += x * x;
    }
    float total = sum(squares);
    for (; i < count; i++) total += to_float(from[i]) * to_float(from[i]);
    const float inverse = 1.0f / __builtin_sqrtf(total / float(count) + eps);
    // the normalised value is rounded before it is weighted, as the reference and the published models do
    for (i = 0; i + W <= count; i += W) {
        T rounded[W];
        store(rounded, load(from + i) * inverse);
        store(to + i, load(rounded) * load(weight + i));
    }
    for (; i < count; i++) to[i] = from_float<T>(to_float(from_float<T>(to_float(from[i]) * inverse)) * to_float(weight[i]));
}

template <class T>
void add_rms_norm(T* residual, const T* update, const T* weight, T* out, int64_t tokens, int width, float eps, int threads) {
    const int team = tokens * width < (1 << 15) ? 1 : threads;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t t = 0; t < tokens; t++) {
        T* row = residual + t * width;
        if (update) {
            const T* more = update + t * width;
            int i = 0;
            for (; i + W <= width; i += W) store(row + i, load(row + i) + load(more + i));
            for (; i < width; i++) row[i] = from_float<T>(to_float(row[i]) + to_float(more[i]));
        }
        normalise(row, weight, out + t * width, width, eps);
    }
}

template <class T> void silu_mul(const T* gate_up, T* out, int64_t tokens, int width, int threads) {
    const int team = tokens * width < (1 << 14) ? 1 : threads;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const T *gate = gate_up + 2 * t * width, *up = gate + width;
        T* to = out + t * width;
        int i = 0;
        for (; i + W <= width; i += W) {
            vf g = load(gate + i);
            store(to + i, g / (expv(-g) + 1.0f) * load(up + i));
        }
        for (; i < width; i++) {
            float g = to_float(gate[i]);
            to[i] = from_float<T>(g / (expv(splat(-g))[0] + 1.0f) * to_float(up[i]));
        }
    }
}

template <class T> inline void rotate(const T* from, const float* cos, const float* sin, T* to, int D) {
    const int half = D / 2;
    int i = 0;
    for (; i + W <= half; i += W) {
        vf a = load(from + i), b = load(from + half + i), c = load(cos + i), s = load(sin + i);
        store(to + i, a * c - b * s);
        store(to + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = to_float(from[i]), b = to_float(from[half + i]);
        to[i] = from_float<T>(a * cos[i] - b * sin[i]);
        to[half + i] = from_float<T>(b * cos[i] + a * sin[i]);
    }
}

struct CacheShape {
    int64_t block_stride, kv_stride, head_stride, num_slots;
    int block_tokens, num_kv_heads, head_dim;
};

template <class T>
int rope_write_kv(T* qkv, int64_t qkv_stride, const float* cos, const float* sin, int64_t num_positions,
                  const int64_t* positions, T* cache, const CacheShape& shape, const int64_t* slots, int64_t tokens,
                  int num_heads, const T* query_norm, const T* key_norm, float eps, int threads) {
    const int D = shape.head_dim, heads = num_heads + shape.num_kv_heads;
    for (int64_t t = 0; t < tokens; t++) {
        if (positions[t] < 0 || positions[t] >= num_positions) return BAD_POSITION;
        if (slots[t] < 0 || slots[t] >= shape.num_slots) return BAD_BLOCK;
    }
    const int team = tokens * heads * D < (1 << 15) ? 1 : threads;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t t = 0; t < tokens; t++) {
        T* row = qkv + t * qkv_stride;
        const float *c = cos + positions[t] * (D / 2), *s = sin + positions[t] * (D / 2);
        T* page = cache + slots[t] / shape.block_tokens * shape.block_stride + slots[t] % shape.block_tokens * D;
        for (int h = 0; h < heads; h++, row += D) {
            const bool is_key = h >= num_heads;
            const T* norm = is_key ? key_norm : query_norm;
            if (norm) normalise(row, norm, row, D, eps);
            rotate(row, c, s, is_key ? page + (h - num_heads) * shape.head_stride : row, D);
        }
        for (int h = 0; h < shape.num_kv_heads; h++, row += D)
            std::memcpy(page + shape.kv_stride + h * shape.head_stride, row, D * sizeof(T));
    }
    return OK;
}

template <class T>
int write_kv(const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* cache, const CacheShape& shape,
             const int64_t* slots, int64_t tokens) {
    const int D = shape.head_dim;
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= shape.num_slots) return BAD_BLOCK;
    for (int64_t t = 0; t < tokens; t++) {
        T* page = cache + slots[t] / shape.block_tokens * shape.block_stride + slots[t] % shape.block_tokens * D;
        for (int h = 0; h < shape.num_kv_heads; h++) {
            std::memcpy(page + h * shape.head_stride, key + t * key_stride + h * D, D * sizeof(T));
            std::memcpy(page + shape.kv_stride + h * shape.head_stride, value + t * value_stride + h * D, D * sizeof(T));
        }
    }
    return OK;
}

// ---- linear layers --------------------------------------------------------------------------------------------------

constexpr int PANEL_VECS = 2;
constexpr int PANEL = W * PANEL_VECS;         // outputs whose weights lie interleaved: weights are [N / PANEL][K][PANEL]
constexpr int STRIP = W == 16 ? 12 : 6;       // rows of activations multiplied at once: STRIP * PANEL_VECS accumulators
constexpr int DEEP = 256;                     // of K at a time, so that a panel's part stays in L1 for all strips
constexpr int AHEAD = 32;                     // of K, to prefetch: the hardware's own stops at every 4 KiB
constexpr int LINEAR_FLOATS_ALONE = 1 << 16;  // weights times rows below which threads do not pay

// One packed weight matrix; mirrored in cpu.py.
struct PackedLinear {
    const void* panels;  // [ceil(N / PANEL)][K][PANEL], zeros behind N
    const void* bias;    // [N] or null
    int64_t inputs, outputs;
    int32_t is_bf16;
};

// sums[row][PANEL] += strip[k][row] * panel[k][PANEL] over `deep` of k. Every sum runs over k in order, in one chain,
// whatever ROWS is: so an output does not depend on which rows are computed together.
template <int ROWS, class T> void multiply(const float* strip, const T* panel, int deep, float* sums, bool fresh) {
    vf acc[ROWS][PANEL_VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; v++) acc[r][v] = fresh ? vf{} : load(sums + r * PANEL + v * W);
    }
    for (int k = 0; k < deep; k++) {
        vf weights[PANEL_VECS];
        for (int v = 0; v < PANEL_VECS; v++) {
            weights[v] = load(panel + int64_t(k) * PANEL + v * W);
            __builtin_prefetch(panel + int64_t(k + AHEAD) * PANEL + v * W);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const float x = strip[k * ROWS + r];
#pragma GCC unroll 2
            for (int v = 0; v < PANEL_VECS; v++) acc[r][v] += weights[v] * x;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; v++) store(sums + r * PANEL + v * W, acc[r][v]);
    }
}

// ROWS rows of activations, `stride` apart, as float32 [K][ROWS].
template <int ROWS, class T> void turn(const T* rows, int64_t stride, int64_t K, float* out) {
    int64_t k = 0;
    for (; k + W <= K; k += W, out += W * ROWS) {
        float piece[ROWS][W];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) store(piece[r], load(rows + r * stride + k));
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) out[i * ROWS + r] = piece[r][i];
    }
    for (; k < K; k++)
        for (int r = 0; r < ROWS; r++) *out++ = to_float(rows[r * stride + k]);
}

template <class T> struct StripKernels {
    void (*turn)(const T*, int64_t, int64_t, float*);
    void (*multiply)(const float*, const T*, int, float*, bool);
};

template <class T, size_t... ROWS> constexpr std::array<StripKernels<T>, STRIP> strip_kernels(std::index_sequence<ROWS...>) {
    return {StripKernels<T>{turn<int(ROWS) + 1, T>, multiply<int(ROWS) + 1, T>}...};
}

// Rows cut into strips of nearly equal height.
struct Strips {
    int64_t rows, count;
    explicit Strips(int64_t rows) : rows(rows), count((rows + STRIP - 1) / STRIP) {}
    int64_t first(int64_t strip) const { return strip * rows / count; }
};

// Sums of one row and panel, with their bias, to where they belong; `left` outputs are left of the row.
template <class T> inline void finish(const float* sums, const T* bias, T* out, int64_t left) {
    if (left >= PANEL) {
        for (int i = 0; i < PANEL; i += W) store(out + i, bias ? load(sums + i) + load(bias + i) : load(sums + i));
    } else {
        for (int i = 0; i < left; i++) out[i] = from_float<T>(bias ? sums[i] + to_float(bias[i]) : sums[i]);
    }
}

template <class T>
void linear(const PackedLinear& layer, const T* from, int64_t from_stride, T* to, int64_t rows, int threads) {
    static constexpr auto kernels = strip_kernels<T>(std::make_index_sequence<STRIP>());
    static thread_local Scratch packed;
    const int64_t K = layer.inputs, N = layer.outputs, panels = (N + PANEL - 1) / PANEL;
    const Strips strips(rows);
    const int team = rows * K * N < LINEAR_FLOATS_ALONE ? 1 : threads;
    // few panels and many rows: cut rows too, or some threads would have nothing to do at the end
    const int64_t cuts = std::min(strips.count, std::max<int64_t>(1, (4 * team + panels - 1) / panels));
    const T* weights = (const T*)layer.panels;
    const T* bias = (const T*)layer.bias;
    packed.start(rows * K);
    float* turned = packed.memory.get();  // strip by strip: [K][rows of the strip]
#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(static)
        for (int64_t strip = 0; strip < strips.count; strip++) {
            const int64_t first = strips.first(strip), height = strips.first(strip + 1) - first;
            kernels[height - 1].turn(from + first * from_stride, from_stride, K, turned + first * K);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < panels * cuts; item++) {
            static thread_local Scratch scratch;
            const int64_t panel = item / cuts, cut = item % cuts;
            const int64_t from_strip = cut * strips.count / cuts, to_strip = (cut + 1) * strips.count / cuts;
            const int64_t first_row = strips.first(from_strip), num_rows = strips.first(to_strip) - first_row;
            scratch.start(num_rows * PANEL);
            float* sums = scratch.memory.get();
            const int64_t step = to_strip - from_strip > 1 ? DEEP : K;
            for (int64_t k = 0; k < K; k += step) {
                for (int64_t strip = from_strip; strip < to_strip; strip++) {
                    const int64_t first = strips.first(strip), height = strips.first(strip + 1) - first;
                    if (k + step >= K)  // the results will be written soon, far apart
                        for (int64_t r = first; r < first + height; r++)
                            for (int v = 0; v < PANEL_VECS; v++) __builtin_prefetch(to + r * N + panel * PANEL + v * W, 1);
                    kernels[height - 1].multiply(turned + first * K + k * height, weights + (panel * K + k) * PANEL,
                                                 int(std::min(step, K - k)), sums + (first - first_row) * PANEL, k == 0);
                }
            }
            const int64_t column = panel * PANEL;
            for (int64_t r = 0; r < num_rows; r++)
                finish(sums + r * PANEL, bias ? bias + column : nullptr, to + (first_row + r) * N + column, N - column);
        }
    }
}

int check_tables(const AttentionCall& call, int num_sequences, int64_t num_blocks, int block_tokens) {
    for (int seq = 0; seq < num_sequences; seq++) {
        const int blocks = (call.context_lens[seq] + block_tokens - 1) / block_tokens;
        if (blocks > call.table_stride) return BAD_BLOCK;
        if (call.query_starts[seq + 1] - call.query_starts[seq] > call.context_lens[seq]) return BAD_POSITION;
        for (int i = 0; i < blocks; i++) {
            const int32_t block = call.block_tables[seq * call.table_stride + i];
            if (block < 0 || block >= num_blocks) return BAD_BLOCK;
        }
    }
    return OK;
}

}  // namespace

// ---- the C interface: `is_bf16` chooses the type of every activation, weight and page ----------------------------------

extern "C" {

int mc_paged_attention(const void* query, int64_t query_stride, void* output, const void* cache, int64_t num_blocks,
                       int64_t block_stride, int64_t kv_stride, int64_t head_stride, int block_tokens, int num_kv_heads,
                       int head_dim, int num_heads, const int32_t* block_tables, int64_t table_stride,
                       const int32_t* query_starts, const int32_t* context_lens, int num_sequences, float scale, int window,
                       int is_bf16, int threads) {
    AttentionCall call{query, query_stride, output, block_tables, query_starts, context_lens, table_stride, num_heads,
                       num_heads / num_kv_heads, head_dim, window, scale * 1.44269504f};
    if (int status = check_tables(call, num_sequences, num_blocks, block_tokens)) return status;
    if (is_bf16) {
        Pages<bf16> pages{(const bf16*)cache, block_stride, kv_stride, head_stride, block_tokens, head_dim};
        return attend(call, pages, num_sequences, num_kv_heads, threads);
    }
    Pages<float> pages{(const float*)cache, block_stride, kv_stride, head_stride, block_tokens, head_dim};
    return attend(call, pages, num_sequences, num_kv_heads, threads);
}

int mc_rope_write_kv(void* qkv, int64_t qkv_stride, const float* cos, const float* sin, int64_t num_positions,
                     const int64_t* positions, void* cache, int64_t num_blocks, int64_t block_stride, int64_t kv_stride,
                     int64_t head_stride, int block_tokens, int num_kv_heads, int head_dim, int num_heads,
                     const int64_t* slots, int64_t tokens, const void* query_norm, const void* key_norm, float eps,
                     int is_bf16, int threads) {
    CacheShape shape{block_stride, kv_stride, head_stride, num_blocks * block_tokens, block_tokens, num_kv_heads, head_dim};
    if (is_bf16)
        return rope_write_kv((bf16*)qkv, qkv_stride, cos, sin, num_positions, positions, (bf16*)cache, shape, slots, tokens,
                             num_heads, (const bf16*)query_norm, (const bf16*)key_norm, eps, threads);
    return rope_write_kv((float*)qkv, qkv_stride, cos, sin, num_positions, positions, (float*)cache, shape, slots, tokens,
                         num_heads, (const float*)query_norm, (const float*)key_norm, eps, threads);
}

int mc_write_kv(const void* key, int64_t key_stride, const void* value, int64_t value_stride, void* cache,
                int64_t num_blocks, int64_t block_stride, int64_t kv_stride, int64_t head_stride, int block_tokens,
                int num_kv_heads, int head_dim, const int64_t* slots, int64_t tokens, int is_bf16) {
    CacheShape shape{block_stride, kv_stride, head_stride, num_blocks * block_tokens, block_tokens, num_kv_heads, head_dim};
    if (is_bf16)
        return write_kv((const bf16*)key, key_stride, (const bf16*)value, value_stride, (bf16*)cache, shape, slots, tokens);
    return write_kv((const float*)key, key_stride, (const float*)value, value_stride, (float*)cache, shape, slots, tokens);
}

// `update` may be null: then only the norm.
int mc_add_rms_norm(void* residual, const void* update, const void* weight, void* out, int64_t tokens, int width, float eps,
                     int is_bf16, int threads) {
    if (is_bf16)
        add_rms_norm((bf16*)residual, (const bf16*)update, (const bf16*)weight, (bf16*)out, tokens, width, eps, threads);
    else
        add_rms_norm((float*)residual, (const float*)update, (const float*)weight, (float*)out, tokens, width, eps, threads);
    return OK;
}

int mc_silu_mul(const void* gate_up, void* out, int64_t tokens, int width, int is_bf16, int threads) {
    if (is_bf16)
        silu_mul((const bf16*)gate_up, (bf16*)out, tokens, width, threads);
    else
        silu_mul((const float*)gate_up, (float*)out, tokens, width, threads);
    return OK;
}

int mc_panel_width() { return PANEL; }

int mc_linear(const PackedLinear* layer, const void* from, int64_t from_stride, void* to, int64_t rows, int threads) {
    if (layer->is_bf16)
        linear(*layer, (const bf16*)from, from_stride, (bf16*)to, rows, threads);
    else
        linear(*layer, (const float*)from, from_stride, (float*)to, rows, threads);
    return OK;
}
}
