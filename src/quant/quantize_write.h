/* quantize_write.h - internal to quantize: bytes to their place in a shard, without filling memory with them. */
#ifndef NIBBLE_QUANTIZE_WRITE_H
#define NIBBLE_QUANTIZE_WRITE_H

#include "base/err.h"
#include "base/str.h"

enum { BEHIND_MAX = 1024 }; /* pieces */

/* Pieces of one thread that are on their way to the disk, oldest first. Start from {0}. */
typedef struct write_behind {
    struct {
        int fd;
        uint64_t at, bytes;
    } v[BEHIND_MAX];
    int first, n;
    uint64_t bytes;
} write_behind;

/* Write n bytes at an offset. `file` names the file in messages. Errors: E-FILE-WRITE. */
NODISCARD bool write_place(int fd, uint64_t to, const void *from, uint64_t n, str file, err *e);

/* Start the disk with a piece just written, and take the oldest ones out of the page cache once more than 64 MB of this
 * thread's are in it. On a failure to reach the disk *lost is set: the kernel reports that once and forgets it, so no earlier
 * write of the file can be trusted. Filesystems that cannot do it are left to the fsync at the end. Errors: E-FILE-WRITE. */
NODISCARD bool write_started(write_behind *b, int fd, uint64_t at, uint64_t n, str file, bool *lost, err *e);

#endif
