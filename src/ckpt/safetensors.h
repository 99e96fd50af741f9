/* safetensors.h - one mapped safetensors file, validated before anything is used.
 *
 * Layout: u64 little-endian header length, JSON header, data. Every byte is hostile: header limit,
 * exact sizes (shape x dtype == end - begin), no overlap, no gap, last end == file size, unique names.
 * Alignment of the data is NOT assumed: views may be odd. Read-only and thread-safe once open. */
#ifndef NIBBLE_SAFETENSORS_H
#define NIBBLE_SAFETENSORS_H

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/file.h"
#include "base/json.h"
#include "base/strtab.h"
#include "num/dtype.h"

enum { ST_MAX_RANK = 8, ST_MAX_NAME = 1024, ST_MAX_HEADER = 100 * 1000 * 1000 };

typedef struct st_tensor {
    str name; /* NUL behind */
    dtype type;
    int rank; /* 0 = scalar */
    int64_t shape[ST_MAX_RANK];
    uint64_t elems, bytes;
    const uint8_t *data; /* into the mapping; maybe unaligned */
    int shard;           /* index of the file inside a ckpt; 0 for a single file */
    int uses;            /* times bound by model/weights (total loading); owner: one loading thread */
} st_tensor;

typedef struct st_file {
    char *path;
    mapping map;
    arena mem;
    st_tensor *tensors; /* [count], in order of their offsets */
    int count;
    const json *metadata; /* object of strings, or NULL */
    strtab table;         /* name -> index into tensors */
} st_file;

/* Errors: E-FILE-*, E-ST-SHORT, E-ST-HEADER, E-ST-JSON (from E-JSON-*), E-ST-DTYPE, E-ST-SHAPE, E-ST-OFFSETS,
 * E-ST-OVERLAP, E-ST-GAP, E-ST-DUP, E-ST-TRAILING: each names the file and the tensor. A file that is
 * cut short after it was opened raises SIGBUS when the lost part is read (main says E-FILE-LOST and ends). */
NODISCARD bool st_open(st_file *out, const char *path, err *e);
/* The same over bytes that the caller keeps alive; `what` names them in messages. */
NODISCARD bool st_open_bytes(st_file *out, const uint8_t *p, size_t n, const char *what, err *e);
void st_close(st_file *f);
/* By name, or NULL. O(1). */
st_tensor *st_find(const st_file *f, str name);

/* ---- writing whole small files (logits, amax); tensors are written in the given order ---- */
typedef struct st_out {
    const char *name;
    dtype type;
    int rank;
    int64_t shape[ST_MAX_RANK];
    const void *data; /* may be NULL when streaming with st_writer */
} st_out;
/* A header in steps, for files whose tensors are not an array of st_out: begin, entries whose data begins at offset `at`
 * (returns where it ends), end (padding to 8 bytes, and the length in front). metadata: object of strings, or NULL. */
void st_header_begin(buf *b, const json *metadata);
uint64_t st_header_entry(buf *b, str name, dtype type, int rank, const int64_t *shape, uint64_t at, uint64_t bytes);
void st_header_end(buf *b);
/* Atomic. Header padded with spaces to 8 bytes. Errors: E-FILE-WRITE. */
NODISCARD bool st_write(const char *path, const st_out *tensors, int count, err *e);

/* Streaming: header first (shapes known), then the data of each tensor in order, in pieces. */
typedef struct st_writer {
    file_out out;
    uint64_t expected, written;
} st_writer;
NODISCARD bool st_writer_open(st_writer *w, const char *path, const st_out *tensors, int count, err *e);
NODISCARD bool st_writer_add(st_writer *w, const void *p, size_t n, err *e);
NODISCARD bool st_writer_commit(st_writer *w, err *e); /* CHECKs that exactly the planned bytes came */
void st_writer_abort(st_writer *w);

#endif
