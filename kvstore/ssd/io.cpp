// Runs of records to and from the SSD's files in one call each, with the interpreter free for everybody else: between
// two system calls nobody has to wait for its lock. kvstore/ssd/io.py is the definition.

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <sys/uio.h>
#include <unistd.h>

#include "../xxh3.h"

namespace {

constexpr int MAX_VECTORS = 512;

struct Read {
    int32_t fd;
    int32_t result;  // 0: as sealed; RIGHT or WRONG below; else minus the error number
    int64_t offset;
    char *into;
    int64_t io_bytes;  // whole pages, of which the block has ``length``
    int64_t length;
    const uint64_t *checksums;  // of equal parts of the block, of xxh3::kMinBytes or more
    int64_t num_checksums;
};
constexpr int32_t RIGHT = 0, WRONG = 1;

int32_t read_one(const Read &job, int64_t step) {
    for (int64_t at = 0; at < job.io_bytes; at += step) {
        const int64_t wanted = std::min(step, job.io_bytes - at);
        const ssize_t got = pread(job.fd, job.into + at, size_t(wanted), job.offset + at);
        if (got != wanted) return got < 0 ? -errno : -EIO;
    }
    const int64_t part = job.length / job.num_checksums;
    for (int64_t i = 0; i < job.num_checksums; ++i)
        if (xxh3::hash(reinterpret_cast<const uint8_t *>(job.into) + i * part, size_t(part)) != job.checksums[i])
            return WRONG;
    return RIGHT;
}

}  // namespace

// One after the other; ``step`` bytes a system call.
extern "C" void read_verified(Read *jobs, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; ++i) jobs[i].result = read_one(jobs[i], step);
}

// Parts of whole pages behind each other from ``offset`` on, about ``step`` bytes a system call, then safe on the disk.
// 0, or the error number.
extern "C" int write_and_sync(int fd, int64_t offset, const iovec *parts, int64_t count, int64_t step) {
    iovec batch[MAX_VECTORS];
    int vectors = 0;
    int64_t total = 0;
    const auto flush = [&] {
        const ssize_t written = vectors ? pwritev(fd, batch, vectors, offset) : 0;
        if (written != total) return written < 0 ? errno : EIO;
        offset += total;
        vectors = 0;
        total = 0;
        return 0;
    };
    for (int64_t i = 0; i < count; ++i) {
        char *base = static_cast<char *>(parts[i].iov_base);
        for (int64_t left = int64_t(parts[i].iov_len); left > 0;) {
            if (vectors == MAX_VECTORS || total >= step)
                if (const int error = flush()) return error;
            const int64_t take = std::min(left, step);
            batch[vectors++] = {base, size_t(take)};
            base += take;
            left -= take;
            total += take;
        }
    }
    if (const int error = flush()) return error;
    return fdatasync(fd) == 0 ? 0 : errno;
}
