#include "quant/quantize_write.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum { BEHIND_BYTES = 64 << 20 };
enum { EARLY = 32 << 10 }; /* smaller writes wait for the fsync */
/* The page cache takes the largest block of memory that a write fills. Blocks of 2 MiB are the ones a hypervisor takes back
 * while they are free, and each page of them costs a fault there when it is next used. */
enum { WRITE_BYTES = 1 << 20 };

bool write_place(int fd, uint64_t to, const void *from, uint64_t n, str file, err *e) {
    for (const uint8_t *p = from; n > 0;) {
        const ssize_t w = pwrite(fd, p, n < WRITE_BYTES ? n : WRITE_BYTES, (off_t)to);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0)
            return fail(e, ERR_MACHINE, "E-FILE-WRITE", STR_FMT ": %s (free space; --resume continues)", STR_ARG(file),
                        w < 0 ? strerror(errno) : "nothing written");
        p += w;
        to += (uint64_t)w;
        n -= (uint64_t)w;
    }
    return true;
}

/* Wait until the oldest piece is on the disk and give its memory to the next ones: pages used a moment ago are in this
 * machine's memory and partly in its caches, fresh ones are cleared by the kernel or fetched from the hypervisor, which
 * costs several times the write. It also leaves the page cache to the source. */
static bool retire(write_behind *b, str file, bool *lost, err *e) {
    const int fd = b->v[b->first].fd;
    const off_t at = (off_t)b->v[b->first].at, n = (off_t)b->v[b->first].bytes;
    b->bytes -= b->v[b->first].bytes;
    b->first = (b->first + 1) % BEHIND_MAX;
    b->n--;
    const unsigned whole = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    if (sync_file_range(fd, at, n, whole) == 0) {
        (void)posix_fadvise(fd, at, n, POSIX_FADV_DONTNEED);
        return true;
    }
    if (errno != EIO && errno != ENOSPC && errno != EDQUOT) return true;
    *lost = true;
    return fail(e, ERR_MACHINE, "E-FILE-WRITE", STR_FMT ": cannot be flushed: %s", STR_ARG(file), strerror(errno));
}

bool write_started(write_behind *b, int fd, uint64_t at, uint64_t n, str file, bool *lost, err *e) {
    if (n < EARLY) return true;
    (void)sync_file_range(fd, (off_t)at, (off_t)n, SYNC_FILE_RANGE_WRITE); /* what fails is seen when it is retired */
    while (b->n == BEHIND_MAX || (b->n > 0 && b->bytes + n > BEHIND_BYTES))
        if (!retire(b, file, lost, e)) return false;
    const int last = (b->first + b->n++) % BEHIND_MAX;
    b->v[last].fd = fd;
    b->v[last].at = at;
    b->v[last].bytes = n;
    b->bytes += n;
    return true;
}
