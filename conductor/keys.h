// Names of blocks, read out of the Python objects that hold them.

#pragma once

#include <cstdint>
#include <cstring>

#include "../mooncake/python_module.h"

constexpr int kKeyBytes = 15;

// The first 15 bytes of a block's name, as two numbers that share the eighth byte.
struct Key {
    uint64_t head, tail;

    static Key of(const char *bytes) {
        Key key;
        std::memcpy(&key.head, bytes, 8);
        std::memcpy(&key.tail, bytes + kKeyBytes - 8, 8);
        return key;
    }
    bool operator==(const Key &other) const { return head == other.head && tail == other.tail; }
    void write(char *bytes) const {
        std::memcpy(bytes + kKeyBytes - 8, &tail, 8);
        std::memcpy(bytes, &head, 8);
    }
    int shard() const { return head & 0xff; }
    uint64_t hash() const {
        const uint64_t mixed = (head * 0x9e3779b97f4a7c15 ^ tail) * 0xd6e8feb86659fd93;
        return mixed ^ mixed >> 32;
    }
};

// Reads item `at` of a sequence of bytes objects; false, and an exception, where that is no key.
inline bool read_key(PyObject *sequence, ssize_t at, Key *key) {
    PyObject *item = PySequence_GetItem(sequence, at);
    if (!item) return false;
    char *bytes;
    ssize_t size;
    const bool is_bytes = PyBytes_AsStringAndSize(item, &bytes, &size) == 0;
    const bool is_key = is_bytes && size >= kKeyBytes;
    if (is_key) *key = Key::of(bytes);
    if (is_bytes && !is_key) PyErr_SetString(PyExc_ValueError, "a block's key has at least 15 bytes");
    Py_DecRef(item);
    return is_key;
}
