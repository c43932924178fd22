// Blocks and who holds them, as prefix_table.py defines it; built at first use.
// Keys are read out of the Python objects that hold them, so that a prompt of 250 blocks is touched in a dozen places.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "keys.h"

namespace {

using python::Array;
using python::method;

constexpr int kNumShards = 256;  // by a key's first byte: what grows at one time is small
constexpr int kFewEnds = 4;      // of runs within a prompt, looked for one after the other
constexpr uint32_t kNobody = 0;  // the empty set

// A set of slots: words that are not zero, in order. Few nodes are few words, wherever their slots are.
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

// `set` without what `keep(word)` does not keep of each word.
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

// Slots that are given as one bit each, densely.
using Bits = Array<const uint64_t>;

uint64_t bits_at(Bits bits, uint32_t at) { return at < bits.size ? bits.data[at] : 0; }

bool is_disjoint(const Set &set, Bits gone) {
    return std::none_of(set.begin(), set.end(), [&](const Word &word) { return word.bits & bits_at(gone, word.at); });
}

void subtract(Set &set, Bits gone) {
    filter(set, [&](const Word &word) { return ~bits_at(gone, word.at); });
}

// One copy of each set that some block needs: most blocks are held by the same nodes as their neighbours.
class Sets {
  public:
    Sets() : records_(1) {}

    const Set &operator[](uint32_t id) const { return records_[id].set; }

    // The set's id, with one user more.
    uint32_t take(const Set &set) {
        if (set.empty()) return kNobody;
        const uint64_t hash = hash_of(set);
        const auto [first, last] = ids_.equal_range(hash);
        for (auto found = first; found != last; ++found)
            if (records_[found->second].set == set) return take(found->second);
        uint32_t id = records_.size();
        if (free_.empty()) {
            records_.emplace_back();
        } else {
            id = free_.back();
            free_.pop_back();
        }
        records_[id].set = Set(set.begin(), set.end());
        ids_.emplace(hash, id);
        return take(id);
    }
    uint32_t take(uint32_t id) {
        ++records_[id].users;
        return id;
    }
    void give_back(uint32_t id) {
        if (id == kNobody || --records_[id].users) return;
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
        uint32_t set = kNobody;  // kNobody: the place is free
    };
    std::vector<Entry> entries;
    size_t used = 0;

    uint32_t find(const Key &key) const {
        if (entries.empty()) return kNobody;
        return entries[place_of(key)].set;
    }
    // Where the key is or may be put.
    Entry &at(const Key &key) {
        if (4 * (used + 1) > 3 * entries.size()) resize(std::max<size_t>(2 * entries.size(), 8));
        return entries[place_of(key)];
    }
    void put(Entry &entry, const Key &key, uint32_t set) {
        used += entry.set == kNobody;
        entry.key = key;
        entry.set = set;
    }
    // Frees the place, and moves up those that had to go past it.
    void erase(Entry &entry) {
        const size_t mask = entries.size() - 1;
        size_t hole = &entry - entries.data();
        for (size_t at = (hole + 1) & mask; entries[at].set != kNobody; at = (at + 1) & mask) {
            const Key key = entries[at].key;
            if (((at - key.hash()) & mask) >= ((at - hole) & mask)) entries[hole] = entries[at], hole = at;
        }
        entries[hole].set = kNobody;
        --used;
    }
    void resize(size_t size) {
        std::vector<Entry> before(size);
        before.swap(entries);
        for (const Entry &entry : before)
            if (entry.set != kNobody) entries[place_of(entry.key)] = entry;
    }

  private:
    size_t place_of(const Key key) const {
        const size_t mask = entries.size() - 1;
        size_t at = key.hash() & mask;
        while (entries[at].set != kNobody && (entries[at].key.head != key.head || entries[at].key.tail != key.tail))
            at = (at + 1) & mask;
        return at;
    }
};

struct Table {
    int64_t max_blocks, num_blocks = 0, dropped = 0;
    Shard shards[kNumShards];
    Sets sets;
    Set alive;                                           // of the prompt that is being matched
    std::vector<std::pair<int64_t, uint32_t>> ahead;  // likewise

    explicit Table(int64_t max_blocks) : max_blocks(max_blocks) {}

    uint32_t holders(const Key &key) const { return shards[key.shard()].find(key); }
};

// What happens to one block of one node: the set after it for the set before. The last answer is kept, with its sets.
class Change {
  public:
    Change(Table &table, bool is_stored, bool is_in_dram, uint32_t slot, uint32_t dram_slot)
        : table_(table), is_stored_(is_stored), is_in_dram_(is_in_dram), slot_(slot), dram_slot_(dram_slot) {}
    ~Change() { forget(); }

    // How many blocks more the node holds.
    int apply(const Key &key) {
        Shard &shard = table_.shards[key.shard()];
        if (!is_stored_ && shard.find(key) == kNobody) return 0;
        Shard::Entry &entry = shard.at(key);
        if (!has_answer_ || entry.set != before_) answer(entry.set);
        if (after_ == before_) return 0;
        if (before_ == kNobody && table_.num_blocks >= table_.max_blocks) {
            ++table_.dropped;
            return 0;
        }
        table_.num_blocks += (before_ == kNobody) - (after_ == kNobody);
        table_.sets.give_back(before_);
        if (after_ == kNobody) {
            shard.erase(entry);
        } else {
            shard.put(entry, key, table_.sets.take(after_));
        }
        return gained_;
    }

  private:
    void answer(uint32_t before) {
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
        has_answer_ = true;
        before_ = before == kNobody ? kNobody : table_.sets.take(before);
        after_ = table_.sets.take(set);
    }
    void forget() {
        if (!has_answer_) return;
        table_.sets.give_back(before_);
        table_.sets.give_back(after_);
    }
    Table &table_;
    const bool is_stored_, is_in_dram_;
    const uint32_t slot_, dram_slot_;
    bool has_answer_ = false;
    uint32_t before_ = kNobody, after_ = kNobody;
    int gained_ = 0;
};

// Ends of runs in one prompt, found by bisection. `ok` is false once a key could not be read.
struct Matching {
    Table &table;
    PyObject *keys;
    int64_t size;
    double *runs;
    int64_t longest = 0;
    uint32_t superset = kNobody;  // of those that are alive
    bool ok = true;

    uint32_t holders(int64_t at) {
        Key key;
        ok = ok && read_key(keys, at, &key);
        return ok ? table.holders(key) : kNobody;
    }
    // Whether all that are alive are in the set. Neighbours often have the same one.
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
        Set &alive = table.alive;  // who holds every block up to `low`
        superset = holders(0);
        alive = table.sets[superset];
        if (retired.size) subtract(alive, retired);
        int64_t low = 1;
        for (int ends = 0; ends < kFewEnds; ++ends) {
            if (alive.empty() || !ok) return;
            for (int64_t high = size; low < high;) {  // the first block that one of them lacks
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
    // Many runs end in `keys`: halve what lies between two look-ups until nobody drops out there.
    void find_ends(int64_t low) {
        Set &alive = table.alive;
        auto &ahead = table.ahead;  // positions looked at already, the nearest last
        ahead.assign(1, {size - 1, holders(size - 1)});
        while (!ahead.empty() && !alive.empty() && ok) {
            const auto [high, nodes] = ahead.back();
            const bool all_hold = has_all(nodes);
            if (!all_hold && high - low > 1) {  // somebody has dropped out between
                const int64_t middle = (low + high) >> 1;
                ahead.emplace_back(middle, holders(middle));
                continue;
            }
            if (!all_hold && high > low) {
                assign(high);
                intersect(alive, table.sets[nodes]);
            }
            low = high;
            ahead.pop_back();
        }
        if (!alive.empty()) assign(size);
    }
};

Table *new_table(int64_t max_blocks) { return new Table(max_blocks); }
void delete_table(Table *table) { delete table; }
int64_t num_blocks(const Table *table) { return table->num_blocks; }
int64_t num_dropped(const Table *table) { return table->dropped; }

// `events`: a sequence of (stored, key, …). How many blocks more the node holds.
int64_t apply(Table *table, PyObject *events, uint32_t slot, uint32_t dram_slot, int is_ssd) {
    const bool is_in_dram = !is_ssd || slot == dram_slot;
    Change stored(*table, true, is_in_dram, slot, dram_slot), removed(*table, false, is_in_dram, slot, dram_slot);
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

// `keys` become readable in a node's cache. How many blocks more it holds.
int64_t load(Table *table, PyObject *keys, uint32_t slot, uint32_t dram_slot, int is_ssd) {
    Change stored(*table, true, !is_ssd || slot == dram_slot, slot, dram_slot);
    const ssize_t size = PySequence_Size(keys);
    int64_t gained = 0;
    Key key;
    for (ssize_t at = 0; at < size && read_key(keys, at, &key); ++at) gained += stored.apply(key);
    return gained;
}

// Leading blocks of `keys` in each slot into `runs`. The longest one.
int64_t match(Table *table, PyObject *keys, Bits retired, Array<double> runs) {
    std::fill_n(runs.data, runs.size, 0.0);
    Matching matching{*table, keys, PySequence_Size(keys), runs.data};
    if (matching.size > 0) matching.match(retired);
    return matching.longest;
}

// A bytes object: 16 bytes for each block of a shard that stands in `slot`, its key and whether it does in `dram_slot`.
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

// Takes the slots of `gone` out of the sets of one shard.
void drop(Table *table, int shard_at, Bits gone) {
    Shard &shard = table->shards[shard_at];
    for (Shard::Entry &entry : shard.entries) {
        if (entry.set == kNobody) continue;
        if (is_disjoint(table->sets[entry.set], gone)) continue;
        Set set = table->sets[entry.set];
        subtract(set, gone);
        table->sets.give_back(entry.set);
        entry.set = table->sets.take(set);
        if (entry.set == kNobody) --table->num_blocks, --shard.used;
    }
    size_t size = 8;
    while (3 * size < 4 * (shard.used + 1)) size *= 2;
    shard.resize(size);
}

}  // namespace

PYTHON_MODULE("prefix_table", method<new_table>("new_table"), method<delete_table>("delete_table"),
              method<num_blocks>("num_blocks"), method<num_dropped>("num_dropped"), method<apply>("apply"),
              method<load>("load"), method<match>("match"), method<blocks_of>("blocks_of"), method<drop>("drop"))
