/* file.h - mapped files, whole reads and atomic replacement. */
#ifndef NIBBLE_FILE_H
#define NIBBLE_FILE_H

#include "base/buf.h"
#include "base/err.h"

typedef struct mapping {
    const uint8_t *data; /* NULL when size is 0 */
    size_t size;
    uint64_t dev, inode; /* identity: the same file reached by two names */
    int64_t mtime_ns;    /* when it was opened */
} mapping;

/* Map a regular file read-only (symbolic links followed). On success *out owns the mapping.
 * Empty files succeed with size 0. Errors: E-FILE-OPEN (missing or unreadable: ERR_INPUT),
 * E-FILE-KIND (directory, device, fifo), E-FILE-MAP (ERR_MACHINE). */
NODISCARD bool mapping_open(mapping *out, const char *path, err *e);
void mapping_close(mapping *m); /* a zeroed mapping is fine */

/* Whole file into `out` (appended), at most max_bytes. Errors: as above, E-FILE-SIZE, E-FILE-READ. */
NODISCARD bool file_read(buf *out, const char *path, size_t max_bytes, err *e);

/* Replace `path` by these bytes so that a reader sees the old file or the new one, never a part:
 * temporary sibling, write, fsync, rename, fsync of the directory. Errors: E-FILE-WRITE. */
NODISCARD bool file_write_atomic(const char *path, const void *p, size_t n, err *e);

/* The same for outputs too large to hold: open a temporary sibling, stream into fd, then commit. */
typedef struct file_out {
    int fd;
    char *path, *temp;
} file_out;
NODISCARD bool file_out_open(file_out *f, const char *path, err *e);
NODISCARD bool file_out_write(file_out *f, const void *p, size_t n, err *e);
NODISCARD bool file_out_commit(file_out *f, err *e);
void file_out_abort(file_out *f); /* removes the temporary; safe after commit and on a zeroed f */

bool file_exists(const char *path);
bool file_is_dir(const char *path);
/* dir + "/" + name, xmalloc'ed. */
char *path_join(const char *dir, const char *name);

#endif
