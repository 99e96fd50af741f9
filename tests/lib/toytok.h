/* toytok.h - small made-up tokenizers for tests: a complete tokenizer.json in which any section can be replaced. */
#ifndef NIBBLE_TEST_TOYTOK_H
#define NIBBLE_TEST_TOYTOK_H

#include "base/buf.h"
#include "base/err.h"
#include "text/tokenizer.h"

/* JSON texts; NULL takes a sound default: the 256 bytes as ids 0..255 in the order of the byte alphabet ('a' is 64),
 * no merges, no added tokens, NFC, and the GPT-2 ByteLevel steps. */
typedef struct toytok {
    const char *vocab;      /* a whole object */
    const char *vocab_more; /* entries behind the default ones, such as ", \"ab\": 256" */
    const char *merges, *added, *normalizer, *pre, *post, *decoder;
    const char *model_more; /* members of model, such as ", \"ignore_merges\": true" */
    const char *top_more;   /* members of the file */
    const char *config;     /* tokenizer_config.json */
} toytok;

/* Write into dir (a scratch folder). */
void toytok_write(const char *dir, const toytok *s);
/* Write into a fresh scratch folder, open, remove the folder. */
bool toytok_open(tokenizer **out, const toytok *s, err *e);
/* Append a code point to out as UTF-8. */
void toytok_code(buf *out, uint32_t code);
/* The ids of a text as "1 2 3" in a static buffer, or the id of the error. */
const char *toytok_ids(const tokenizer *t, str text, const encode_options *o);

/* ---- random tests: the seed is printed and SEED=... takes it back ---- */

typedef struct rnd {
    uint64_t state;
} rnd;
rnd rnd_open(uint64_t seed);
uint64_t rnd_next(rnd *r); /* splitmix64 */
static inline uint32_t rnd_below(rnd *r, uint32_t n) { return (uint32_t)(rnd_next(r) % n); }

/* Processor seconds of this thread. */
double cpu_seconds(void);

#endif
