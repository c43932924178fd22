// Blocks and the sets of nodes that hold them, as table.py defines them; built at first use.
// Keys are read from the Python objects that hold them, so that only a dozen of a prompt's 250 keys are touched.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../keys.h"

namespace {

using python::Array;
using python::method;

constexpr int kNumShards = 256;  // by a key's first byte: a growing table stops the process only briefly
constexpr int kFewEnds = 4;      // of runs within a prompt, found one after the other
constexpr uint32_t kEmptySet = 0;  // its id

// A set of slots: its words that are not zero, in order. Few nodes are few words, wherever their slots are.
struct Word {
    uint32_t at;
    uint64_t bits;
    bool operator==(const Word &other) const { return at == other.at && bits == other.bits; }
};
using Set = std::vector<Word>;

Set::iterator word_of(Set &set, uint32_t slot) {
    return std::lower_bound(set.begin(), set.end(), slot / 64, [](const Word &w, uint32_t at) { return w.at < at; });
}

bool holds(const Set &set, uint32_t slot) {
    const auto word = word_of(const_cast<Set &>(set), slot);
    return word != set.end() && word->at == slot / 64 && word->bits >> slot % 64 & 1;
}

void add(Set &set, uint32_t slot) {
    auto word = word_of(set, slot);
    if (word == set.end() || word->at != slot / 64) word = set.insert(word, Word{slot / 64, 0});
    word->bits |= uint64_t(1) << slot % 64;
}

void remove(Set &set, uint32_t slot) {
    const auto word = word_of(set, slot);
    if (word == set.end() || word->at != slot / 64) return;
    word->bits &= ~(uint64_t(1) << slot % 64);
    if (!word->bits) set.erase(word);
}

// Keeps of each word of `set` the bits of `keep(word)`.
template <typename Keep> void filter(Set &set, Keep keep) {
    size_t kept = 0;
    for (const Word &word : set) {
        const uint64_t bits = word.bits & keep(word);
        if (bits) set[kept++] = Word{word.at, bits};
    }
    set.resize(kept);
}

void intersect(Set &set, const Set &other) {
    auto at = other.begin();
    filter(set, [&](const Word &word) {
        while (at != other.end() && at->at < word.at) ++at;
        return at != other.end() && at->at == word.at ? at->bits : 0;
    });
}

bool is_subset(const Set &some, const Set &all) {
    auto at = all.begin();
    for (const Word &word : some) {
        while (at != all.end() && at->at < word.at) ++at;
        if (at == all.end() || at->at != word.at || word.bits & ~at->bits) return false;
    }
    return true;
}

// Slots as a dense bit set.
using Bits = Array<const uint64_t>;

uint64_t bits_at(Bits bits, uint32_t at) { return at < bits.size ? bits.data[at] : 0; }

bool is_disjoint(const Set &set, Bits gone) {
    return std::none_of(set.begin(), set.end(), [&](const Word &word) { return word.bits & bits_at(gone, word.at); });
}

void subtract(Set &set, Bits gone) {
    filter(set, [&](const Word &word) { return ~bits_at(gone, word.at); });
}

// Sets by id, one copy of each, counted by use: most blocks are held by the same nodes as their neighbours.
class SharedSets {
  public:
    SharedSets() : records_(1) {}

    const Set &operator[](uint32_t id) const { return records_[id].set; }

    // The set's id, with one more user.
    uint32_t acquire(const Set &set) {
        if (set.empty()) return kEmptySet;
        const uint64_t hash = hash_of(set);
        const auto [first, last] = ids_.equal_range(hash);
        for (auto found = first; found != last; ++found)
            if (records_[found->second].set == set) return acquire(found->second);
        uint32_t id = records_.size();
        if (free_.empty()) {
            records_.emplace_back();
        } else {
            id = free_.back();
            free_.pop_back();
        }
        records_[id].set = Set(set.begin(), set.end());
        ids_.emplace(hash, id);
        return acquire(id);
    }
    uint32_t acquire(uint32_t id) {
        ++records_[id].users;
        return id;
    }
    void release(uint32_t id) {
        if (id == kEmptySet || --records_[id].users) return;
        auto found = ids_.equal_range(hash_of(records_[id].set)).first;
        while (found->second != id) ++found;
        ids_.erase(found);
        records_[id].set = Set();
        free_.push_back(id);
    }

  private:
    struct Record {
        Set set;
        uint64_t users = 0;
    };
    static uint64_t hash_of(const Set &set) {
        uint64_t hash = set.size();
        for (const Word &word : set) {
            hash = (hash ^ word.bits ^ uint64_t(word.at) << 48) * 0x9e3779b97f4a7c15;
            hash ^= hash >> 29;
        }
        return hash;
    }
    std::vector<Record> records_;
    std::unordered_multimap<uint64_t, uint32_t> ids_;
    std::vector<uint32_t> free_;
};

// Open addressing with linear probing; no tombstones.
class Shard {
  public:
    struct __attribute__((packed, aligned(4))) Entry {
        Key key;
        uint32_t set = kEmptySet;  // kEmptySet: the entry is free
    };
    std::vector<Entry> entries;
    size_t used = 0;

    uint32_t find(const Key &key) const {
        if (entries.empty()) return kEmptySet;
        return entries[index_of(key)].set;
    }
    // The key's entry, or the free one where it may be put.
    Entry &at(const Key &key) {
        if (4 * (used + 1) > 3 * entries.size()) resize(std::max<size_t>(2 * entries.size(), 8));
        return entries[index_of(key)];
    }
    void put(Entry &entry, const Key &key, uint32_t set) {
        used += entry.set == kEmptySet;
        entry.key = key;
        entry.set = set;
    }
    // Frees the entry, and moves back entries that had been displaced by it.
    void erase(Entry &entry) {
        const size_t mask = entries.size() - 1;
        size_t hole = &entry - entries.data();
        for (size_t at = (hole + 1) & mask; entries[at].set != kEmptySet; at = (at + 1) & mask) {
            const Key key = entries[at].key;
            if (((at - key.hash()) & mask) >= ((at - hole) & mask)) entries[hole] = entries[at], hole = at;
        }
        entries[hole].set = kEmptySet;
        --used;
    }
    void resize(size_t size) {
        std::vector<Entry> before(size);
        before.swap(entries);
        for (const Entry &entry : before)
            if (entry.set != kEmptySet) entries[index_of(entry.key)] = entry;
    }

  private:
    size_t index_of(const Key key) const {
        const size_t mask = entries.size() - 1;
        size_t at = key.hash() & mask;
        while (entries[at].set != kEmptySet && (entries[at].key.head != key.head || entries[at].key.tail != key.tail))
            at = (at + 1) & mask;
        return at;
    }
};

struct Table {
    int64_t max_blocks, num_blocks = 0, dropped = 0;
    Shard shards[kNumShards];
    SharedSets sets;
    Set alive;                                          // slots that hold every block of the prompt so far
    std::vector<std::pair<int64_t, uint32_t>> pending;  // look-ups in the prompt still to be used

    explicit Table(int64_t max_blocks) : max_blocks(max_blocks) {}

    uint32_t holders(const Key &key) const { return shards[key.shard()].find(key); }
};

// Adds one node to blocks' sets, or removes it. The result for the last set is kept, as neighbours often have the same.
class Update {
  public:
    Update(Table &table, bool is_stored, bool is_in_dram, uint32_t slot, uint32_t dram_slot)
        : table_(table), is_stored_(is_stored), is_in_dram_(is_in_dram), slot_(slot), dram_slot_(dram_slot) {}
    ~Update() { forget(); }

    // Returns the change in the number of blocks that the node holds.
    int apply(const Key &key) {
        Shard &shard = table_.shards[key.shard()];
        if (!is_stored_ && shard.find(key) == kEmptySet) return 0;
        Shard::Entry &entry = shard.at(key);
        if (!is_computed_ || entry.set != before_) compute(entry.set);
        if (after_ == before_) return 0;
        if (before_ == kEmptySet && table_.num_blocks >= table_.max_blocks) {
            ++table_.dropped;
            return 0;
        }
        table_.num_blocks += (before_ == kEmptySet) - (after_ == kEmptySet);
        table_.sets.release(before_);
        if (after_ == kEmptySet) {
            shard.erase(entry);
        } else {
            shard.put(entry, key, table_.sets.acquire(after_));
        }
        return gained_;
    }

  private:
    void compute(uint32_t before) {
        forget();
        Set set = table_.sets[before];
        const bool held = holds(set, slot_);
        if (is_stored_) {
            add(set, slot_);
            is_in_dram_ ? add(set, dram_slot_) : remove(set, dram_slot_);
        } else if (held) {
            remove(set, slot_);
            remove(set, dram_slot_);
        }
        gained_ = int(is_stored_) - int(held);
        is_computed_ = true;
        before_ = before == kEmptySet ? kEmptySet : table_.sets.acquire(before);
        after_ = table_.sets.acquire(set);
    }
    void forget() {
        if (!is_computed_) return;
        table_.sets.release(before_);
        table_.sets.release(after_);
    }
    Table &table_;
    const bool is_stored_, is_in_dram_;
    const uint32_t slot_, dram_slot_;
    bool is_computed_ = false;
    uint32_t before_ = kEmptySet, after_ = kEmptySet;
    int gained_ = 0;
};

// Ends of runs in one prompt, found by bisection. `ok` is false once a key could not be read.
struct Matching {
    Table &table;
    PyObject *keys;
    int64_t size;
    double *runs;
    int64_t longest = 0;
    uint32_t superset = kEmptySet;  // a set that contains `alive`
    bool ok = true;

    uint32_t holders(int64_t at) {
        Key key;
        ok = ok && read_key(keys, at, &key);
        return ok ? table.holders(key) : kEmptySet;
    }
    // Whether the set contains `alive`. Neighbours often have the same one.
    bool has_all(uint32_t set) {
        if (set == superset) return true;
        if (!is_subset(table.alive, table.sets[set])) return false;
        superset = set;
        return true;
    }
    void assign(int64_t run) {
        longest = run;
        for (const Word &word : table.alive)
            for (uint64_t bits = word.bits; bits; bits &= bits - 1)
                runs[64 * int64_t(word.at) + __builtin_ctzll(bits)] = run;
    }
    void match(Bits retired) {
        Set &alive = table.alive;  // slots that hold every block up to `low`
        superset = holders(0);
        alive = table.sets[superset];
        if (retired.size) subtract(alive, retired);
        int64_t low = 1;
        for (int ends = 0; ends < kFewEnds; ++ends) {
            if (alive.empty() || !ok) return;
            for (int64_t high = size; low < high;) {  // find the first block that one of them lacks
                const int64_t middle = (low + high) >> 1;
                if (has_all(holders(middle))) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            assign(low);  // those that go on are assigned again
            if (low == size) return;
            intersect(alive, table.sets[holders(low++)]);
        }
        find_ends(low - 1);
    }
    // Many runs end in `keys`: halve the interval between two look-ups until no slot drops out inside it.
    void find_ends(int64_t low) {
        Set &alive = table.alive;
        auto &pending = table.pending;  // positions already looked up, the nearest last
        pending.assign(1, {size - 1, holders(size - 1)});
        while (!pending.empty() && !alive.empty() && ok) {
            const auto [high, nodes] = pending.back();
            const bool all_hold = has_all(nodes);
            if (!all_hold && high - low > 1) {  // some slot dropped out in between
                const int64_t middle = (low + high) >> 1;
                pending.emplace_back(middle, holders(middle));
                continue;
            }
            if (!all_hold && high > low) {
                assign(high);
                intersect(alive, table.sets[nodes]);
            }
            low = high;
            pending.pop_back();
        }
        if (!alive.empty()) assign(size);
    }
};

Table *new_table(int64_t max_blocks) { return new Table(max_blocks); }
void delete_table(Table *table) { delete table; }
int64_t num_blocks(const Table *table) { return table->num_blocks; }
int64_t num_dropped(const Table *table) { return table->dropped; }

// `events`: a sequence of (stored, key, …). Returns the change in the number of blocks that the node holds.
int64_t apply(Table *table, PyObject *events, uint32_t slot, uint32_t dram_slot, int is_ssd) {
    const bool is_in_dram = !is_ssd || slot == dram_slot;
    Update stored(*table, true, is_in_dram, slot, dram_slot), removed(*table, false, is_in_dram, slot, dram_slot);
    const ssize_t size = PySequence_Size(events);
    int64_t gained = 0;
    for (ssize_t at = 0; at < size; ++at) {
        PyObject *event = PySequence_GetItem(events, at);
        PyObject *what = event ? PySequence_GetItem(event, 0) : nullptr;
        const int is_stored = what ? PyObject_IsTrue(what) : -1;
        Key key;
        const bool ok = is_stored >= 0 && read_key(event, 1, &key);
        if (what) Py_DecRef(what);
        if (event) Py_DecRef(event);
        if (!ok) break;
        gained += (is_stored ? stored : removed).apply(key);
    }
    return gained;
}

// `keys` become readable in a node's cache. Returns how many more blocks it holds.
int64_t load(Table *table, PyObject *keys, uint32_t slot, uint32_t dram_slot, int is_ssd) {
    Update stored(*table, true, !is_ssd || slot == dram_slot, slot, dram_slot);
    const ssize_t size = PySequence_Size(keys);
    int64_t gained = 0;
    Key key;
    for (ssize_t at = 0; at < size && read_key(keys, at, &key); ++at) gained += stored.apply(key);
    return gained;
}

// Writes the number of leading blocks of `keys` that each slot holds into `runs`. Returns the largest.
int64_t match(Table *table, PyObject *keys, Bits retired, Array<double> runs) {
    std::fill_n(runs.data, runs.size, 0.0);
    Matching matching{*table, keys, PySequence_Size(keys), runs.data};
    if (matching.size > 0) matching.match(retired);
    return matching.longest;
}

// Returns a bytes object, 16 bytes for each block of a shard that `slot` holds: its key, and whether `dram_slot` does.
PyObject *blocks_of(const Table *table, int shard, uint32_t slot, uint32_t dram_slot) {
    std::string found;
    for (const Shard::Entry &entry : table->shards[shard].entries) {
        const Set &nodes = table->sets[entry.set];
        if (!holds(nodes, slot)) continue;
        char record[kKeyBytes + 1];
        const Key key = entry.key;
        key.write(record);
        record[kKeyBytes] = holds(nodes, dram_slot);
        found.append(record, sizeof record);
    }
    return PyBytes_FromStringAndSize(found.data(), found.size());
}

// Removes the slots of `gone` from the sets of one shard.
void drop(Table *table, int shard_at, Bits gone) {
    Shard &shard = table->shards[shard_at];
    for (Shard::Entry &entry : shard.entries) {
        if (entry.set == kEmptySet) continue;
        if (is_disjoint(table->sets[entry.set], gone)) continue;
        Set set = table->sets[entry.set];
        subtract(set, gone);
        table->sets.release(entry.set);
        entry.set = table->sets.acquire(set);
        if (entry.set == kEmptySet) --table->num_blocks, --shard.used;
    }
    size_t size = 8;
    while (3 * size < 4 * (shard.used + 1)) size *= 2;
    shard.resize(size);
}

}  // namespace

PYTHON_MODULE("prefix_table", method<new_table>("new_table"), method<delete_table>("delete_table"),
              method<num_blocks>("num_blocks"), method<num_dropped>("num_dropped"), method<apply>("apply"),
              method<load>("load"), method<match>("match"), method<blocks_of>("blocks_of"), method<drop>("drop"))
