/* requant.h - the draft head of an existing export added, replaced or taken out; nothing else of the export changes.
 *
 * All new files grow in a hidden folder of the export, `.requant-mtp.partial`. When they are complete and on the disk the
 * folder is renamed to `.requant-mtp`: from then on the change is decided, and what remains are renames into place - shards,
 * index, configs, last the removal of files that only held the old head. A run that ended before that rename leaves the
 * export as it was; one that ended after it is finished by requant_open of the next run, without computing anything.
 * The head gets a file of its own. A file that holds parts of the old head and other tensors is written anew without the
 * head, the other tensors' bytes as they were; every other file stays untouched. */
#ifndef NIBBLE_REQUANT_H
#define NIBBLE_REQUANT_H

#include "quant/configs.h"
#include "quant/quantize.h"

typedef enum requant_fate { FATE_KEEP, FATE_REWRITE, FATE_REMOVE } requant_fate;

typedef struct requant {
    ckpt dst; /* the export */
    model_config config;
    recipe recipe;             /* .preset and .kv as the trunk has them, .mtp as asked for */
    str prefix;                /* of its text tensors */
    requant_fate *fate;        /* [dst.shard_count] */
    char *head_file;           /* name of the new head's file */
    const char *had;           /* "none", "bf16", "nvfp4": the old head */
    quant_arith arith;         /* of its scales, as it says itself; ARITH_CUDA when it says nothing */
    quant_algorithm algorithm; /* of its weights, as it says itself; QUANT_MAX when it says nothing */
    int lock;                  /* descriptor of the folder, locked; -1 */
    uint64_t head_bytes;       /* of the old head's tensors */
    uint64_t rewrite_bytes;    /* data of the files to write anew */
} requant;

/* Open the export in `dir`, first finishing what an interrupted run left (N-REQUANT-FINISHED). With `look` nothing is
 * written or locked. Errors: those of ckpt_open and config_read; E-REQUANT-EXPORT (no export of this kind),
 * E-REQUANT-BUSY (another run has it), E-REQUANT-UNFINISHED (`look`, and an interrupted run must be finished first),
 * E-REQUANT-FORMAT (mtp is MTP_NVFP4 and the trunk has no NVFP4 layers), E-FILE-WRITE. */
NODISCARD bool requant_open(requant *out, const char *dir, recipe_mtp mtp, bool look, err *e);
/* Is `src` the model that the export was made of, as far as shapes tell? Warning W-REQUANT-TRUNK: its final norm differs.
 * Errors: E-REQUANT-SAME (one folder), E-REQUANT-MODEL (names the field). */
NODISCARD bool requant_match(const requant *r, const ckpt *src, const model_config *config, err *e);
/* May this export be changed, or `out` (may be NULL) be made? For callers with long work to do first. E-QUANT-DST. */
NODISCARD bool requant_check_target(const requant *r, const char *out, err *e);
void requant_close(requant *r);

typedef struct requant_job {
    const plan *head; /* of plan_make_head with r->recipe and r->head_file; NULL: the head is taken out */
    const provenance *from;
    quantize_options options; /* of the head's own tensors */
    const char *out;          /* a folder to make instead of changing the export; NULL: in place */
    const buf *summary;       /* nibble_mtp_summary.json, made by on_head after the head was written; may be NULL */
    void (*on_head)(void *ctx, const quantize_result *result);
    void (*on_step)(void *ctx, const char *what); /* after each step that a kill could follow; may be NULL */
    void *ctx;                                    /* of both */
} requant_job;

/* Do it. Errors: those of quantize_shards; E-REQUANT-CONFIG (a quantization section that is not understood),
 * E-QUANT-DST (`out`), E-FILE-*; ERR_INTERRUPTED E-QUANT-STOPPED, only while the export is still as it was. */
NODISCARD bool requant_run(quantize_result *result, const requant *r, const requant_job *job, err *e);

/* Internal: texts of the configs (requant_config.c), and the renames (requant_finish.c). */
NODISCARD bool requant_config_text(buf *out, const requant *r, const plan *head, err *e);
NODISCARD bool requant_hf_quant_text(buf *out, const requant *r, const plan *head, const provenance *from, err *e);
#define REQUANT_STAGE ".requant-mtp"
#define REQUANT_REMOVE "remove.list"
NODISCARD bool requant_finish(const char *dir, void (*on_step)(void *ctx, const char *what), void *ctx, err *e);
bool requant_is_unfinished(const char *dir);
void requant_remove_folder(const char *path); /* with the plain files in it */
NODISCARD bool requant_sync_folder(const char *path, err *e);

#endif
