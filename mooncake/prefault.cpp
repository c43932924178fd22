// Memory touched page by page, so that the kernel provides it.
//
// A fault takes no lock of the whole address space (Linux 6.4 and later), as MADV_POPULATE_WRITE does. Whoever maps
// memory would wait for that lock, and so for a thread of the lowest priority that waits for a processor.
#include <cstddef>
#include <cstdint>

// Leaves every byte as it is, whoever writes there meanwhile: where one is not 0, its page has been written already.
extern "C" void prefault_touch(uint8_t *memory, size_t num_bytes, size_t page_bytes) {
    for (size_t at = 0; at < num_bytes; at += page_bytes) {
        uint8_t expected = 0;
        __atomic_compare_exchange_n(memory + at, &expected, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}
