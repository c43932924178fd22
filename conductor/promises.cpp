// Marks of prompts that wait for a prefill node, as promises.py defines them; built at first use.

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "keys.h"

namespace {

using python::method;

struct Hash {
    size_t operator()(const Key &key) const { return key.hash(); }
};

// One prompt that waits.
struct Promise {
    std::vector<Key> marks;
    int64_t end = 0;  // its blocks, where it ends between two marks
};

struct Promises {
    const int64_t stride;  // blocks between two marks
    std::unordered_map<Key, std::vector<uint32_t>, Hash> waiting;  // by mark, the numbers of the prompts
    std::vector<int64_t> ends;                                     // how many prompts end so, by their blocks
    std::vector<Promise> promises{1};                              // by number; 0 is nobody's
    std::vector<uint32_t> free;

    explicit Promises(int64_t stride) : stride(stride) {}

    uint32_t take_number() {
        if (free.empty()) {
            promises.emplace_back();
            return promises.size() - 1;
        }
        const uint32_t number = free.back();
        free.pop_back();
        return number;
    }
};

// Whether the prompt's first `blocks` blocks end with a mark; `ok` is false once a key could not be read.
struct Marked {
    const Promises &all;
    PyObject *keys;
    bool ok = true;

    const std::vector<uint32_t> *at(int64_t blocks) {
        Key key;
        ok = ok && read_key(keys, blocks - 1, &key);
        if (!ok) return nullptr;
        const auto found = all.waiting.find(key);
        return found == all.waiting.end() ? nullptr : &found->second;
    }
};

Promises *new_promises(int64_t stride) { return new Promises(stride); }
void delete_promises(Promises *all) { delete all; }

// The promise's number.
int64_t give(Promises *all, PyObject *keys, int64_t held) {
    const int64_t size = PySequence_Size(keys), stride = all->stride;
    Promise promise;
    Key key;
    for (int64_t at = (held / stride + 1) * stride - 1; at < size; at += stride) {
        if (!read_key(keys, at, &key)) return -1;
        promise.marks.push_back(key);
    }
    if (size > held && size % stride) {
        if (!read_key(keys, size - 1, &key)) return -1;
        promise.marks.push_back(key);
        promise.end = size;
        if (int64_t(all->ends.size()) <= size) all->ends.resize(size + 1);
        ++all->ends[size];
    }
    const uint32_t number = all->take_number();
    for (const Key &mark : promise.marks) all->waiting[mark].push_back(number);
    all->promises[number] = std::move(promise);
    return number;
}

void keep(Promises *all, int64_t number) {
    Promise &promise = all->promises[number];
    if (promise.end) --all->ends[promise.end];
    for (const Key &mark : promise.marks) {
        const auto found = all->waiting.find(mark);
        auto &numbers = found->second;
        numbers.erase(std::find(numbers.begin(), numbers.end(), number));
        if (numbers.empty()) all->waiting.erase(found);
    }
    promise = Promise();
    all->free.push_back(number);
}

// How many leading blocks of `keys` end with the deepest mark beyond `held` blocks, and the numbers of those who wait with
// it; a 0 alone: there is none.
PyObject *deepest(const Promises *all, PyObject *keys, int64_t held) {
    const int64_t size = PySequence_Size(keys), stride = all->stride, base = held / stride;
    Marked marked{*all, keys};
    int64_t low = base;
    for (int64_t high = size / stride; low < high;) {
        const int64_t middle = (low + high + 1) >> 1;
        if (marked.at(middle * stride)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    int64_t depth = low > base ? low * stride : 0;
    for (int64_t end = std::min((low + 1) * stride - 1, size); end > std::max(low * stride, held); --end) {
        if (end >= int64_t(all->ends.size()) || !all->ends[end] || !marked.at(end)) continue;
        depth = end;  // a shorter prompt ends there
        break;
    }
    const std::vector<uint32_t> *numbers = depth ? marked.at(depth) : nullptr;
    if (!marked.ok) return nullptr;
    PyObject *found = PyTuple_New(1 + (numbers ? numbers->size() : 0));
    ssize_t at = 0;
    PyTuple_SetItem(found, at++, PyLong_FromLongLong(depth));
    if (numbers)
        for (const uint32_t number : *numbers) PyTuple_SetItem(found, at++, PyLong_FromLongLong(number));
    return found;
}

}  // namespace

PYTHON_MODULE("promises", method<new_promises>("new_promises"), method<delete_promises>("delete_promises"),
              method<give>("give"), method<keep>("keep"), method<deepest>("deepest"))
