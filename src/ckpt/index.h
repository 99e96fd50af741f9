/* index.h - model.safetensors.index.json: which file holds which tensor. Private to ckpt/. */
#ifndef NIBBLE_INDEX_H
#define NIBBLE_INDEX_H

#include "ckpt/ckpt.h"

#define CKPT_SINGLE "model.safetensors"
#define CKPT_INDEX "model.safetensors.index.json"

typedef struct ckpt_index {
    arena mem;
    const json *map;      /* weight_map: object of plain file names */
    const json *metadata; /* object or NULL */
    const char **files;   /* [file_count] distinct, in byte order */
    int file_count;
    uint32_t *file_of; /* [map->n] index into files of each member */
} ckpt_index;

/* Read and check. A file name must be one path component that ends in .safetensors and does not begin
 * with a dot, so nothing outside the directory is ever opened. Errors: E-FILE-*, E-CKPT-INDEX. */
NODISCARD bool index_read(ckpt_index *out, const char *path, err *e);
/* The files of the index and the *.safetensors files of the directory are the same.
 * Errors: E-CKPT-SHARD-MISSING, E-CKPT-SHARD-EXTRA. */
NODISCARD bool index_check_files(const ckpt_index *x, const char *dir, err *e);
/* Every tensor lies in the file that the index names, and in the index. c is open.
 * Errors: E-CKPT-INDEX, E-CKPT-TENSOR-MISSING, E-CKPT-TENSOR-EXTRA. Warning: W-CKPT-TOTAL. */
NODISCARD bool index_check_tensors(const ckpt_index *x, const ckpt *c, err *e);
void index_free(ckpt_index *x);

/* Place of a tensor in the order of ckpt_at, or -1. */
int ckpt_number(const ckpt *c, str name);
/* First (in byte order) *.safetensors file of dir that is not in the sorted list and could be part of a model: by its name,
 * by a tensor's name, or because it cannot be read; others are skipped (N-CKPT-IGNORED). count 0: the first of all.
 * xmalloc'ed, or NULL. */
char *ckpt_unlisted(const char *dir, const char *const *files, int count);
/* Is there a directory entry, be it a symbolic link to nothing? */
bool ckpt_entry_exists(const char *dir, const char *name);

#endif
