// Arenas for Python's small objects out of huge pages; arenas.py says why. The interpreter's lock is held throughout.

#include <cstddef>
#include <cstdint>
#include <sys/mman.h>
#include <vector>

#include "../../python_module.h"

extern "C" {
struct PyObjectArenaAllocator {
    void *context;
    void *(*allocate)(void *context, size_t size);
    void (*free)(void *context, void *arena, size_t size);
};
void PyObject_GetArenaAllocator(PyObjectArenaAllocator *);
void PyObject_SetArenaAllocator(PyObjectArenaAllocator *);
}

namespace {

constexpr size_t kHugePage = 2 << 20, kRegion = 32 * kHugePage;

PyObjectArenaAllocator before;            // what served until now, and what we cannot
std::vector<char *> regions;              // each kRegion bytes
char *unused = nullptr, *end = nullptr;   // of the last region
std::vector<void *> freed;                // arenas to be given out again
size_t arena_size = 0;                    // all are of one size

bool add_region() {
    void *mapped = mmap(nullptr, kRegion + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return false;
    unused = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) & ~(kHugePage - 1));
    end = unused + kRegion;
    madvise(unused, kRegion, MADV_HUGEPAGE);  // a kernel without huge pages gives small ones
    regions.push_back(unused);
    return true;
}

void *allocate(void *, size_t size) {
    if (!arena_size) arena_size = size;
    if (size != arena_size) return before.allocate(before.context, size);
    if (!freed.empty()) {
        void *const arena = freed.back();
        freed.pop_back();
        return arena;
    }
    if (size_t(end - unused) < size && !add_region()) return nullptr;
    void *const arena = unused;
    unused += size;
    return arena;
}

void free_arena(void *, void *arena, size_t size) {
    for (char *region : regions) {
        if (arena >= region && arena < region + kRegion) return freed.push_back(arena);
    }
    before.free(before.context, arena, size);
}

void use_huge_pages() {
    PyObjectArenaAllocator ours{nullptr, allocate, free_arena};
    PyObject_GetArenaAllocator(&before);
    PyObject_SetArenaAllocator(&ours);
}

}  // namespace

PYTHON_MODULE("arenas", python::method<use_huge_pages>("use_huge_pages"))
