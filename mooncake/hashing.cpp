// The chain of block keys in one call: OpenSSL's SHA-256, found in the process or on the machine, without the price of
// a Python object for each block. mooncake/hashing.py is the definition.

#include <cstdint>
#include <cstring>
#include <dlfcn.h>

namespace {

// OpenSSL's SHA256_CTX: 112 bytes in every version; room to spare.
struct Context {
    alignas(16) unsigned char bytes[256];
};
using Init = int (*)(Context *);
using Update = int (*)(Context *, const void *, size_t);
using Final = int (*)(unsigned char *, Context *);

Init sha_init;
Update sha_update;
Final sha_final;

}  // namespace

// Whether the library can be used.
extern "C" int find_sha256(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return 0;
    sha_init = reinterpret_cast<Init>(dlsym(library, "SHA256_Init"));
    sha_update = reinterpret_cast<Update>(dlsym(library, "SHA256_Update"));
    sha_final = reinterpret_cast<Final>(dlsym(library, "SHA256_Final"));
    return sha_init && sha_update && sha_final;
}

// keys: [count, 32] bytes. Each is the hash of the key before (or of parent) and its block.
extern "C" void extend_chain(const unsigned char *parent, int64_t parent_bytes, const unsigned char *blocks,
                             int64_t block_bytes, int64_t count, unsigned char *keys) {
    Context context;
    for (int64_t i = 0; i < count; ++i) {
        sha_init(&context);
        if (i == 0)
            sha_update(&context, parent, size_t(parent_bytes));
        else
            sha_update(&context, keys + 32 * (i - 1), 32);
        sha_update(&context, blocks + i * block_bytes, size_t(block_bytes));
        sha_final(keys + 32 * i, &context);
    }
}
