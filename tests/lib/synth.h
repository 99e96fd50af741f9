/* synth.h - small random checkpoints for tests, in every layout the loader accepts.
 *
 * A tensor's values depend on the seed and on what it is (layer, role, expert), not on how it is stored: fused and
 * split experts, plain and interleaved projections, the prefixes and the float types hold the same numbers, so views
 * of two variants can be compared byte for byte. Values are BF16 numbers in every type. Between synth_make and
 * synth_write a test may damage anything. Aborts on failure. */
#ifndef NIBBLE_TESTS_SYNTH_H
#define NIBBLE_TESTS_SYNTH_H

#include "base/buf.h"
#include "num/dtype.h"

typedef struct synth_spec {
    int vocab, hidden, layers, interval; /* every interval-th layer is full attention */
    int heads, kv_heads, head_dim, lin_k_heads, lin_v_heads, lin_k_dim, lin_v_dim;
    int experts, topk, moe_inter, shared_inter, inter;
    bool dense, next, tied, no_mtp, vision, no_gate;
    bool text_only; /* config without text_config, architecture ...ForCausalLM */
    bool split_experts, split_mtp_experts;
    bool f32_vectors;   /* A_log and linear_attn.norm as F32, as the 3.5 series has them */
    const char *prefix; /* "model.language_model." ... */
    dtype type;         /* of everything else */
    uint64_t seed;
} synth_spec;

typedef struct synth_tensor {
    char *name;
    dtype type;
    int rank;
    int64_t shape[4];
    uint8_t *data;
    size_t bytes;
} synth_tensor;

typedef struct synth {
    synth_tensor *t;
    int n;
    buf config, generation; /* JSON texts */
} synth;

synth_spec synth_default(void); /* MoE, 5 layers (interval 2), hidden 32, 4 experts, draft head, vision tensors */
void synth_make(synth *s, const synth_spec *spec);
void synth_free(synth *s);

synth_tensor *synth_find(synth *s, const char *name); /* aborts when absent */
void synth_drop(synth *s, const char *name);
void synth_rename(synth *s, const char *from, const char *to); /* a prefix of names: all that start with it */
synth_tensor *synth_add(synth *s, const char *name, dtype type, int rank, const int64_t *shape); /* zeros */
/* In the config text: replace the value of the first "key": (up to the next ',' or '}' on that level) by `json`. */
void synth_config_set(synth *s, const char *key, const char *json);

/* One file and no index, or `shards` files with one. `pad` spaces are added to each header (odd: unaligned data). */
void synth_write(const synth *s, const char *dir, int shards, int pad);
/* A new folder under TMPDIR or /tmp; synth_remove_dir deletes it with all inside and frees the name. */
char *synth_temp_dir(void);
void synth_remove_dir(char *dir);
void synth_write_file(const char *dir, const char *name, const void *p, size_t n);

#endif
