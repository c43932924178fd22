// Markers of prompts in prefill, as pending.py defines them; built at first use.

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../keys.h"

namespace {

using python::method;

struct Hash {
    size_t operator()(const Key &key) const { return key.hash(); }
};

struct Prompt {
    std::vector<Key> markers;
    int64_t end = 0;  // its length in blocks if that is no multiple of the stride
};

struct Prefixes {
    const int64_t stride;  // blocks between two markers
    std::unordered_map<Key, std::vector<uint32_t>, Hash> numbers;  // by marker: the prompts that have it
    std::vector<int64_t> ends;                                     // number of prompts by `end`
    std::vector<Prompt> prompts{1};                                // by number; 0 is never given
    std::vector<uint32_t> free;                                    // numbers to be reused

    explicit Prefixes(int64_t stride) : stride(stride) {}

    uint32_t take_number() {
        if (free.empty()) {
            prompts.emplace_back();
            return prompts.size() - 1;
        }
        const uint32_t number = free.back();
        free.pop_back();
        return number;
    }
};

// Looks up blocks of one prompt among the markers; `ok` is false once a key could not be read.
struct Lookup {
    const Prefixes &prefixes;
    PyObject *keys;
    bool ok = true;

    // The prompts with a marker at the end of the first `blocks` blocks; null: none.
    const std::vector<uint32_t> *at(int64_t blocks) {
        Key key;
        ok = ok && read_key(keys, blocks - 1, &key);
        if (!ok) return nullptr;
        const auto found = prefixes.numbers.find(key);
        return found == prefixes.numbers.end() ? nullptr : &found->second;
    }
};

Prefixes *new_prefixes(int64_t stride) { return new Prefixes(stride); }
void delete_prefixes(Prefixes *prefixes) { delete prefixes; }

// Returns the prompt's number.
int64_t add(Prefixes *prefixes, PyObject *keys, int64_t held) {
    const int64_t size = PySequence_Size(keys), stride = prefixes->stride;
    Prompt prompt;
    Key key;
    for (int64_t at = (held / stride + 1) * stride - 1; at < size; at += stride) {
        if (!read_key(keys, at, &key)) return -1;
        prompt.markers.push_back(key);
    }
    if (size > held && size % stride) {
        if (!read_key(keys, size - 1, &key)) return -1;
        prompt.markers.push_back(key);
        prompt.end = size;
        if (int64_t(prefixes->ends.size()) <= size) prefixes->ends.resize(size + 1);
        ++prefixes->ends[size];
    }
    const uint32_t number = prefixes->take_number();
    for (const Key &marker : prompt.markers) prefixes->numbers[marker].push_back(number);
    prefixes->prompts[number] = std::move(prompt);
    return number;
}

void remove(Prefixes *prefixes, int64_t number) {
    Prompt &prompt = prefixes->prompts[number];
    if (prompt.end) --prefixes->ends[prompt.end];
    for (const Key &marker : prompt.markers) {
        const auto found = prefixes->numbers.find(marker);
        auto &numbers = found->second;
        numbers.erase(std::find(numbers.begin(), numbers.end(), number));
        if (numbers.empty()) prefixes->numbers.erase(found);
    }
    prompt = Prompt();
    prefixes->free.push_back(number);
}

// Returns a tuple: leading blocks of `keys` up to the deepest marker beyond `held` blocks (0: none), then the numbers of
// the prompts that have it.
PyObject *deepest(const Prefixes *prefixes, PyObject *keys, int64_t held) {
    const int64_t size = PySequence_Size(keys), stride = prefixes->stride, base = held / stride;
    Lookup markers{*prefixes, keys};
    int64_t low = base;
    for (int64_t high = size / stride; low < high;) {
        const int64_t middle = (low + high + 1) >> 1;
        if (markers.at(middle * stride)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    int64_t depth = low > base ? low * stride : 0;
    for (int64_t end = std::min((low + 1) * stride - 1, size); end > std::max(low * stride, held); --end) {
        if (end >= int64_t(prefixes->ends.size()) || !prefixes->ends[end] || !markers.at(end)) continue;
        depth = end;  // a prompt ends between two strides
        break;
    }
    const std::vector<uint32_t> *numbers = depth ? markers.at(depth) : nullptr;
    if (!markers.ok) return nullptr;
    PyObject *found = PyTuple_New(1 + (numbers ? numbers->size() : 0));
    ssize_t at = 0;
    PyTuple_SetItem(found, at++, PyLong_FromLongLong(depth));
    if (numbers)
        for (const uint32_t number : *numbers) PyTuple_SetItem(found, at++, PyLong_FromLongLong(number));
    return found;
}

}  // namespace

PYTHON_MODULE("pending_prefixes", method<new_prefixes>("new_prefixes"), method<delete_prefixes>("delete_prefixes"),
              method<add>("add"), method<remove>("remove"), method<deepest>("deepest"))
