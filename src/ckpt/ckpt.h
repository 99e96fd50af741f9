/* ckpt.h - a checkpoint directory: config files, safetensors shards, sidecars. The door of ckpt/.
 *
 * Accepts model.safetensors, or model.safetensors.index.json + shards (symbolic links as in an HF
 * cache are followed). Index and shards must agree exactly: a tensor in a shard and not in the index,
 * the reverse, a missing or an unlisted shard file are errors that name it. The folder of a model in an
 * HF cache (models--org--name) stands for the snapshot of its refs/main, or for its only snapshot.
 * Nothing outside the directory is opened by name. */
#ifndef NIBBLE_CKPT_H
#define NIBBLE_CKPT_H

#include "ckpt/safetensors.h"

typedef struct ckpt {
    char *dir; /* resolved: where the files are */
    arena mem;
    st_file *shards;
    int shard_count;
    int tensor_count; /* over all shards */
    uint64_t tensor_bytes;
    const json *config;         /* config.json */
    const json *generation;     /* generation_config.json or NULL */
    const json *hf_quant;       /* hf_quant_config.json or NULL */
    const json *index_metadata; /* "metadata" of the index or NULL */
    struct ckpt_table *table;   /* name -> tensor */
} ckpt;

/* Open and validate everything. Errors: E-CKPT-DIR (no such directory, or it holds no model),
 * E-CKPT-CONFIG, E-CKPT-INDEX (unreadable, absent beside several shards, or a tensor lies in another
 * file than it says), E-CKPT-SHARD-MISSING, E-CKPT-SHARD-EXTRA, E-CKPT-TENSOR-MISSING,
 * E-CKPT-TENSOR-EXTRA, E-CKPT-DUP (one name in two shards), and those of st_open.
 * Warning W-CKPT-TOTAL: metadata.total_size is not the sum of the tensors. */
NODISCARD bool ckpt_open(ckpt *out, const char *dir, err *e);
/* Only config files and sidecars; shard_count stays 0 (no error when shards are absent). */
NODISCARD bool ckpt_open_configs(ckpt *out, const char *dir, err *e);
void ckpt_close(ckpt *c);

st_tensor *ckpt_find(const ckpt *c, str name); /* or NULL; O(1) */
/* The i-th tensor over all shards, 0 <= i < tensor_count. */
st_tensor *ckpt_at(const ckpt *c, int i);
const char *ckpt_shard_path(const ckpt *c, const st_tensor *t);

#endif
