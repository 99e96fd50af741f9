#include "quant/requant.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "model/names.h"
#include "model/weights_quant.h"

#define HEAD_FILE "model-mtp"

/* ---- what the export is ---- */

typedef struct census {
    bool w4a4, w4, fp8, kv; /* formats and K/V scales of the trunk */
    bool head, head_nvfp4;
} census;

static census count(const ckpt *c) {
    census n = { 0 };
    for (int i = 0; i < c->tensor_count; i++) {
        const st_tensor *t = ckpt_at(c, i);
        const bool codes = str_ends(t->name, STR(".weight_scale_2"));
        if (name_is_mtp(t->name)) {
            n.head = true;
            n.head_nvfp4 |= codes;
            continue;
        }
        n.kv |= name_is_kv_scale(t->name);
        n.fp8 |= t->type == DT_F8_E4M3 && str_ends(t->name, STR(".weight"));
        if (!codes) continue;
        char input[ST_MAX_NAME + 16];
        n.w4 = true;
        snprintf(input, sizeof input, "%.*s.input_scale", (int)(t->name.n - strlen(".weight_scale_2")), t->name.p);
        n.w4a4 |= ckpt_find(c, str_of(input)) != NULL;
    }
    return n;
}

static bool fail_export(err *e, const char *dir, const char *why) {
    return fail(e, ERR_INPUT, "E-REQUANT-EXPORT", "%s: %s (give an export of `nibble quantize` or ModelOpt)", dir, why);
}

static bool check_export(const ckpt *c, const census *n, err *e) {
    const json *own = json_get(c->config, "quantization_config"), *method = json_get(own, "quant_method");
    if (!own && !c->hf_quant) return fail_export(e, c->dir, "is not quantized: no quantization_config");
    if (json_is(method, JSON_STRING) && strcmp(method->u.s, "modelopt") != 0) {
        char why[120];
        snprintf(why, sizeof why, "its quant_method is %.60s", method->u.s);
        return fail_export(e, c->dir, why);
    }
    return n->w4 || n->fp8 ||
           fail_export(e, c->dir, "declares a quantization, but no weight of its trunk is quantized");
}

static bool find_recipe(requant *r, const census *n, recipe_mtp mtp, err *e) {
    bool declared = false;
    if (!quant_kv_declared(&declared, &r->dst, e)) return false;
    r->recipe = (recipe){ .preset = n->w4a4           ? RECIPE_NVFP4
                                    : n->w4 && n->fp8 ? RECIPE_MIXED
                                                      : RECIPE_NVFP4_W4A16,
                          .kv = n->kv      ? KV_FP8
                                : declared ? KV_FP8_CAST
                                           : KV_NONE,
                          .mtp = mtp };
    if (mtp == MTP_NVFP4 && !n->w4)
        return fail(e, ERR_INPUT, "E-REQUANT-FORMAT",
                    "%s: the trunk is FP8 only, loaders would take an NVFP4 head for FP8 (--mtp bf16)", r->dst.dir);
    return true;
}

static bool find_prefix(requant *r, err *e) {
    for (int i = 0; i < NAME_PREFIXES; i++) {
        char name[200];
        snprintf(name, sizeof name, "%sembed_tokens.weight", name_prefixes[i]);
        if (ckpt_find(&r->dst, str_of(name))) return r->prefix = str_of(name_prefixes[i]), true;
    }
    return fail_export(e, r->dst.dir, "holds no embed_tokens.weight");
}

static void find_rules(requant *r) {
    const json *record = json_get(r->dst.hf_quant, "nibble"), *arith = json_get(record, "arithmetic"),
               *algorithm = json_get(record, "algorithm");
    r->arith = json_is(arith, JSON_STRING) && strcmp(arith->u.s, "cpu") == 0 ? ARITH_CPU : ARITH_CUDA;
    r->algorithm = QUANT_MAX;
    for (int i = 0; json_is(algorithm, JSON_STRING) && quant_algorithms[i]; i++)
        if (strcmp(algorithm->u.s, quant_algorithms[i]) == 0) r->algorithm = (quant_algorithm)i;
}

/* ---- files ---- */

static const char *file_name(const st_file *f) { return strrchr(f->path, '/') + 1; }

/* What becomes of each file, and the name of the head's: one that only held the old head is written over. */
static void find_fates(requant *r) {
    r->fate = xcalloc((size_t)r->dst.shard_count + 1, sizeof *r->fate);
    for (int s = 0; s < r->dst.shard_count; s++) {
        const st_file *f = &r->dst.shards[s];
        uint64_t kept = 0;
        int heads = 0;
        for (int i = 0; i < f->count; i++) {
            const bool mtp = name_is_mtp(f->tensors[i].name);
            heads += mtp;
            *(mtp ? &r->head_bytes : &kept) += f->tensors[i].bytes;
        }
        if (heads) r->fate[s] = heads == f->count ? FATE_REMOVE : FATE_REWRITE;
        if (r->fate[s] == FATE_REWRITE) r->rewrite_bytes += kept;
    }
}

static bool is_taken(const requant *r, const char *name) {
    for (int s = 0; s < r->dst.shard_count; s++)
        if (r->fate[s] != FATE_REMOVE && strcmp(file_name(&r->dst.shards[s]), name) == 0) return true;
    return false;
}

static void find_head_file(requant *r) {
    char name[64];
    snprintf(name, sizeof name, HEAD_FILE ".safetensors");
    for (int i = 2; is_taken(r, name); i++) snprintf(name, sizeof name, HEAD_FILE "-%d.safetensors", i);
    r->head_file = xstrdup(name);
}

/* ---- the door ---- */

/* The folder itself is locked; the lock goes with the process. Some filesystems know none. */
static bool lock(requant *r, const char *dir, err *e) {
    r->lock = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (r->lock < 0) return true; /* unreadable: what follows says it */
    if (flock(r->lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return true;
    return fail(e, ERR_INPUT, "E-REQUANT-BUSY", "%s: another requant-mtp is at work on this export (wait for it)", dir);
}

static bool finish_earlier(const char *dir, bool look, err *e) {
    if (!requant_is_unfinished(dir)) return true;
    if (look)
        return fail(e, ERR_INPUT, "E-REQUANT-UNFINISHED",
                    "%s: an interrupted requant-mtp is to be finished first (run without --dry-run)", dir);
    log_say("N-REQUANT-FINISHED", "%s: an earlier, interrupted run was complete and is put into place first", dir);
    return requant_finish(dir, NULL, NULL, e);
}

/* The folder of a cache stands for one of its snapshots, so names are resolved before anything is looked for. */
static bool prepare(requant *r, const char *dir, bool look, err *e) {
    ckpt names;
    if (!ckpt_open_configs(&names, dir, e)) return false;
    const bool ok = (look || lock(r, names.dir, e)) && finish_earlier(names.dir, look, e);
    ckpt_close(&names);
    return ok;
}

bool requant_open(requant *out, const char *dir, recipe_mtp mtp, bool look, err *e) {
    requant *r = out;
    *r = (requant){ .lock = -1 };
    bool ok = prepare(r, dir, look, e) && ckpt_open(&r->dst, dir, e);
    const census n = ok ? count(&r->dst) : (census){ 0 };
    ok = ok && check_export(&r->dst, &n, e) && find_prefix(r, e) &&
         config_read(&r->config, r->dst.config, r->dst.generation, dir, e) && find_recipe(r, &n, mtp, e);
    if (!ok) {
        requant_close(r);
        return false;
    }
    r->had = !n.head ? "none" : n.head_nvfp4 ? "nvfp4" : "bf16";
    find_rules(r);
    find_fates(r);
    find_head_file(r);
    return true;
}

void requant_close(requant *r) {
    if (r->lock >= 0) close(r->lock);
    free(r->fate);
    free(r->head_file);
    if (r->dst.dir) ckpt_close(&r->dst);
    *r = (requant){ .lock = -1 };
}

/* ---- is it the same model? ---- */

static bool same_shape(const model_config *a, const model_config *b, const char **field, long long *x, long long *y) {
    const struct {
        const char *name;
        int64_t a, b;
    } fields[] = {
        { "hidden_size", a->hidden, b->hidden },
        { "num_hidden_layers", a->layers, b->layers },
        { "vocab_size", a->vocab, b->vocab },
        { "num_attention_heads", a->heads, b->heads },
        { "num_key_value_heads", a->kv_heads, b->kv_heads },
        { "head_dim", a->head_dim, b->head_dim },
        { "num_experts", a->experts, b->experts },
        { "num_experts_per_tok", a->topk, b->topk },
        { "moe_intermediate_size", a->moe_inter, b->moe_inter },
        { "shared_expert_intermediate_size", a->shared_inter, b->shared_inter },
        { "intermediate_size", a->inter, b->inter },
        { "attn_output_gate", a->attn_gate, b->attn_gate },
        { "rotary dimensions", a->rotary_dim, b->rotary_dim },
    };
    for (size_t i = 0; i < ARRAY_LEN(fields); i++)
        if (fields[i].a != fields[i].b) {
            *field = fields[i].name;
            *x = fields[i].a;
            *y = fields[i].b;
            return false;
        }
    return true;
}

static const st_tensor *final_norm(const ckpt *c) {
    for (int i = 0; i < NAME_PREFIXES; i++) {
        char name[200];
        snprintf(name, sizeof name, "%snorm.weight", name_prefixes[i]);
        const st_tensor *t = ckpt_find(c, str_of(name));
        if (t) return t;
    }
    return NULL;
}

bool requant_match(const requant *r, const ckpt *src, const model_config *config, err *e) {
    struct stat a, b;
    const char *field;
    long long mine, theirs;
    if (stat(r->dst.dir, &a) == 0 && stat(src->dir, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        return fail(e, ERR_USAGE, "E-REQUANT-SAME",
                    "%s: export and --source are the same folder (give the BF16 original)", src->dir);
    if (!same_shape(&r->config, config, &field, &mine, &theirs))
        return fail(e, ERR_INPUT, "E-REQUANT-MODEL",
                    "%s: %s is %lld here and %lld in %s (give the model it was made of)", r->dst.dir, field, mine,
                    theirs, src->dir);
    if (memcmp(r->config.layer, config->layer, (size_t)config->layers) != 0)
        return fail(e, ERR_INPUT, "E-REQUANT-MODEL",
                    "%s: layer_types are not those of %s (give the model it was made of)", r->dst.dir, src->dir);
    const st_tensor *x = final_norm(&r->dst), *y = final_norm(src);
    if (x && y && (x->bytes != y->bytes || memcmp(x->data, y->data, x->bytes) != 0))
        log_say("W-REQUANT-TRUNK", "%s: its final norm is not that of %s: the head was trained for another trunk",
                r->dst.dir, src->dir);
    return true;
}
