#include "check/finding.h"

#include <stdio.h>
#include <stdlib.h>

const char *const severity_names[] = { "note", "warning", "error" };

typedef struct rule {
    const char *id;
    severity severity;
    const char *remedy;
} rule;

static const rule rules[] = {
    /* files */
    { "C-FILE-CONFIG", SEV_ERROR, "restore config.json from the source model" },
    { "C-FILE-SIDE", SEV_ERROR, "restore the file from the source model" },
    { "C-FILE-SHARD", SEV_ERROR, "download or write that file again" },
    { "C-FILE-MISSING", SEV_ERROR, "download the missing files" },
    { "C-FILE-EXTRA", SEV_ERROR, "move the file away, or rebuild the index (check --fix)" },
    { "C-FILE-NONE", SEV_ERROR, "give the folder that holds the weights" },
    { "C-INDEX-BAD", SEV_ERROR, "rebuild the index (check --fix)" },
    { "C-INDEX-ABSENT", SEV_ERROR, "rebuild the index (check --fix)" },
    { "C-INDEX-PLACE", SEV_ERROR, "swapped or renamed shards: download again, or rebuild the index (check --fix)" },
    { "C-INDEX-LOST", SEV_ERROR, "download the shard again, or quantize again" },
    { "C-INDEX-UNLISTED", SEV_ERROR, "rebuild the index (check --fix)" },
    { "C-INDEX-TOTAL", SEV_WARNING, "rebuild the index (check --fix)" },
    { "C-FILE-DUP", SEV_ERROR, "remove the stale copy" },
    { "C-SIDE-TOKENIZER", SEV_WARNING, "copy tokenizer.json from the source model (check --fix --source)" },
    { "C-SIDE-TEMPLATE", SEV_WARNING, "copy the chat template from the source model (check --fix --source)" },
    { "C-SIDE-GENERATION", SEV_WARNING, "copy generation_config.json from the source model (check --fix --source)" },
    { "C-SIDE-VISION", SEV_NOTE, "copy the preprocessor configs from the source model (check --fix --source)" },
    /* config */
    { "C-CONFIG-MODEL", SEV_ERROR, "restore config.json from the source model" },
    { "C-CONFIG-DTYPE", SEV_WARNING, "write dtype and torch_dtype bfloat16 into config.json (check --fix)" },
    { "C-STOP-NONE", SEV_WARNING, "set eos_token_id in generation_config.json" },
    { "C-STOP-RANGE", SEV_ERROR, "set eos_token_id in generation_config.json to tokens of the tokenizer" },
    { "C-STOP-TURN", SEV_WARNING, "add that token to eos_token_id in generation_config.json" },
    { "C-TEXT-TOKENIZER", SEV_ERROR, "restore tokenizer.json from the source model" },
    { "C-TEXT-VOCAB", SEV_ERROR, "tokenizer and weights belong to different models: restore the right one" },
    { "C-TEXT-TEMPLATE", SEV_ERROR, "restore the chat template from the source model" },
    /* tensors */
    { "C-TENSOR-MISSING", SEV_ERROR, "quantize again, or restore the right config.json" },
    { "C-TENSOR-UNUSED", SEV_ERROR, "no loader consumes it: rename or remove it, or restore the right config.json" },
    { "C-TENSOR-SHAPE", SEV_ERROR, "restore the config.json that belongs to the weights" },
    { "C-TENSOR-DTYPE", SEV_ERROR, "quantize again" },
    { "C-MTP-ABSENT", SEV_WARNING, "nibble requant-mtp DIR --source SRC adds the draft head" },
    { "C-MTP-UNDECLARED", SEV_WARNING, "set mtp_num_hidden_layers to 1 in config.json" },
    { "C-MTP-FC", SEV_ERROR, "nibble requant-mtp DIR --source SRC writes the head anew, with mtp.fc in BF16" },
    /* declarations */
    { "C-QUANT-UNDECLARED", SEV_ERROR, "quantize again: no loader knows that the weights are quantized" },
    { "C-QUANT-NOTHING", SEV_ERROR, "remove the quantization section, or restore the quantized weights" },
    { "C-QUANT-ONE", SEV_WARNING, "some loaders read one file, some the other: write both (quantize again)" },
    { "C-QUANT-AGREE", SEV_ERROR, "make config.json and hf_quant_config.json say the same (quantize again)" },
    { "C-QUANT-ALGO", SEV_ERROR, "use NVFP4, W4A16_NVFP4, FP8 or MIXED_PRECISION" },
    { "C-QUANT-GROUP", SEV_ERROR, "NVFP4 has blocks of 16: set group_size to 16" },
    { "C-QUANT-LAYERS", SEV_ERROR, "make quantized_layers list what is quantized (quantize again)" },
    { "C-EXCL-QUANTIZED", SEV_ERROR, "take the pattern off the exclude lists (check --fix)" },
    { "C-EXCL-PLAIN", SEV_ERROR, "add the modules to the exclude lists (check --fix)" },
    { "C-EXCL-FC", SEV_WARNING, "add mtp.fc* to the exclude lists (check --fix)" },
    { "C-EXCL-NAMESPACE", SEV_NOTE, "list the modules under model.* and language_model.model.* too (check --fix)" },
    /* scales */
    { "C-SCALE-MISSING", SEV_ERROR, "quantize again" },
    { "C-SCALE-DTYPE", SEV_ERROR, "quantize again" },
    { "C-SCALE-NAN", SEV_ERROR, "quantize again" },
    { "C-SCALE-ZERO", SEV_ERROR, "quantize again" },
    { "C-SCALE-NEGATIVE", SEV_ERROR, "quantize again" },
    { "C-SCALE-ONE", SEV_WARNING, "a scale of exactly 1 looks like a placeholder: calibrate, or quantize again" },
    { "C-SCALE-OUTLIER", SEV_WARNING, "compare with --source, or quantize again" },
    { "C-SCALE-GROUP", SEV_ERROR, "engines that fuse these modules use one scale for all: quantize again" },
    { "C-SCALE-SATURATED", SEV_WARNING, "weight_scale_2 is too small for the block scales: quantize again" },
    { "C-SCALE-COARSE", SEV_WARNING, "weight_scale_2 is too large for the block scales: quantize again" },
    { "C-INPUT-MIXED", SEV_WARNING, "quantize again: modules of one kind have input_scale or have none" },
    { "C-INPUT-CLIPS", SEV_WARNING, "calibrate with more text, or use generous scales (--mtp-scales generous)" },
    { "C-INPUT-LOOSE", SEV_WARNING, "calibrate: this input_scale wastes the range of the block scales" },
    { "C-KV-FORMAT", SEV_ERROR, "declare FP8, or no KV cache format" },
    { "C-KV-MISSING", SEV_ERROR, "quantize again with --kv fp8, or declare none" },
    { "C-KV-CAST", SEV_NOTE, "none needed: without scales FP8 means scale 1; --kv fp8 calibrates" },
    { "C-KV-UNDECLARED", SEV_WARNING, "declare kv_cache_quant_algo FP8, or remove the scales" },
    { "C-KV-RANGE", SEV_WARNING, "calibrate again: sound K and V scales lie between 1e-4 and 1" },
    /* values */
    { "C-VALUE-NONFINITE", SEV_ERROR, "restore the tensor from the source model" },
    { "C-VALUE-ZERO", SEV_ERROR,
      "restore the tensor: nothing but zeros is in it (--source tells whether that is right)" },
    { "C-VALUE-HOLE", SEV_ERROR, "download the shard again: a stretch of zeros is no code of these scales" },
    /* source */
    { "C-SRC-MISSING", SEV_WARNING, "quantize again from this source" },
    { "C-SRC-SHAPE", SEV_ERROR, "this is no export of that source: give the right --source" },
    { "C-SRC-COPY", SEV_ERROR, "restore the tensor from the source" },
    { "C-SRC-ERROR", SEV_ERROR, "quantize again" },
    { "C-SRC-BYTES", SEV_WARNING,
      "made by another rule, or damaged: the relative error tells; quantize again to be sure" },
    { "C-SRC-SCALE", SEV_NOTE, "none needed when the relative error is sound" },
    { "C-SRC-CONFIG", SEV_WARNING, "restore the field from the source's config.json" },
    /* the loader */
    { "C-LOAD-REFUSED", SEV_ERROR, "see the message" },
    { "C-LOAD-WARNING", SEV_NOTE, "see the message" },
    /* other engines */
    { "C-TARGET-FAILS", SEV_ERROR, "" },
    { "C-TARGET-WRONG", SEV_ERROR, "" },
    { "C-TARGET-DRAFTS", SEV_WARNING, "" },
    { "C-TARGET-DEGRADED", SEV_WARNING, "" },
};

const char *finding_rule(int i) { return i >= 0 && i < (int)ARRAY_LEN(rules) ? rules[i].id : NULL; }

static const rule *find_rule(const char *id) {
    for (size_t i = 0; i < ARRAY_LEN(rules); i++)
        if (strcmp(rules[i].id, id) == 0) return &rules[i];
    CHECK(false, "no rule %s", id);
    return NULL;
}

static finding *entry(findings *f, const rule *r, severity s, const char *cause) {
    for (int i = 0; i < f->n; i++)
        if (f->v[i].rule == r->id && f->v[i].severity == s &&
            (cause ? f->v[i].cause && strcmp(f->v[i].cause, cause) == 0 : !f->v[i].cause))
            return &f->v[i];
    if (f->n == f->cap) {
        f->cap = f->cap ? 2 * f->cap : 16;
        f->v = xrealloc(f->v, (size_t)f->cap * sizeof *f->v);
    }
    f->v[f->n] = (finding){ .rule = r->id, .severity = s, .remedy = r->remedy, .cause = cause ? xstrdup(cause) : NULL };
    return &f->v[f->n++];
}

static void add(findings *f, const rule *r, severity s, const char *cause, str object, const char *fmt, va_list ap) {
    finding *x = entry(f, r, s, cause);
    if (!x->count) {
        buf text = { 0 };
        buf_vprintf(&text, fmt, ap);
        for (size_t i = 0; i < text.n; i++)
            if ((unsigned char)text.p[i] < 0x20) text.p[i] = '?'; /* one line, whatever the file holds */
        x->message = text.p;
    }
    if (x->count == x->cap) {
        x->cap = x->cap ? 2 * x->cap : 4;
        x->objects = xrealloc(x->objects, (size_t)x->cap * sizeof *x->objects);
    }
    char *own = xmalloc(object.n + 1);
    if (object.n) memcpy(own, object.p, object.n);
    own[object.n] = 0;
    x->objects[x->count++] = (str){ own, object.n };
}

void finding_add(findings *f, const char *rule_id, const char *cause, str object, const char *fmt, ...) {
    const rule *r = find_rule(rule_id);
    va_list ap;
    va_start(ap, fmt);
    add(f, r, r->severity, cause, object, fmt, ap);
    va_end(ap);
}

void finding_add_as(findings *f, severity s, const char *rule_id, const char *cause, str object, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    add(f, find_rule(rule_id), s, cause, object, fmt, ap);
    va_end(ap);
}

void finding_set_remedy(findings *f, const char *remedy) { f->v[f->n - 1].remedy = remedy; }

int findings_of(const findings *f, severity s) {
    int n = 0;
    for (int i = 0; i < f->n; i++) n += f->v[i].severity == s;
    return n;
}

bool findings_has(const findings *f, const char *id) {
    for (int i = 0; i < f->n; i++)
        if (strcmp(f->v[i].rule, id) == 0) return true;
    return false;
}

void findings_sort(findings *f) {
    for (int i = 1; i < f->n; i++) { /* stable, and there are few */
        const finding x = f->v[i];
        int k = i;
        for (; k > 0 && f->v[k - 1].severity < x.severity; k--) f->v[k] = f->v[k - 1];
        f->v[k] = x;
    }
}

void findings_free(findings *f) {
    for (int i = 0; i < f->n; i++) {
        for (int k = 0; k < f->v[i].count; k++) free((void *)(uintptr_t)f->v[i].objects[k].p);
        free(f->v[i].objects);
        free(f->v[i].message);
        free(f->v[i].cause);
    }
    free(f->v);
    *f = (findings){ 0 };
}

/* ---- patterns ---- */

enum { MAX_NUMBERS = 4 };

/* A name as its text with "\1" for each whole numeric component, and the numbers. */
typedef struct shape {
    str text; /* owned */
    int numbers[MAX_NUMBERS], n;
} shape;

static int whole_number(str s, size_t at, size_t *end) {
    size_t i = at;
    int v = 0;
    while (i < s.n && s.p[i] >= '0' && s.p[i] <= '9' && i - at < 7) v = v * 10 + (s.p[i++] - '0');
    *end = i;
    return i > at && (i == s.n || s.p[i] == '.') ? v : -1;
}

static shape take_shape(str name) {
    shape x = { 0 };
    buf b = { 0 };
    for (size_t i = 0; i < name.n;) {
        size_t end = i;
        const bool start = i > 0 && name.p[i - 1] == '.';
        const int v = start && x.n < MAX_NUMBERS ? whole_number(name, i, &end) : -1;
        if (v >= 0) {
            x.numbers[x.n++] = v;
            buf_byte(&b, 1);
            i = end;
        } else {
            buf_byte(&b, name.p[i++]);
        }
    }
    x.text = (str){ b.p ? b.p : xstrdup(""), b.n };
    return x;
}

static int by_text(const void *a, const void *b) { return str_cmp(((const shape *)a)->text, ((const shape *)b)->text); }
static int by_int(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* "{0-39}", "{3,7-9}" or a plain "5". */
static void put_numbers(buf *out, const shape *v, int n, int which) {
    int *all = xmalloc((size_t)n * sizeof *all), m = 0;
    for (int i = 0; i < n; i++) all[i] = v[i].numbers[which];
    qsort(all, (size_t)n, sizeof *all, by_int);
    for (int i = 0; i < n; i++)
        if (m == 0 || all[m - 1] != all[i]) all[m++] = all[i];
    if (m == 1) {
        buf_printf(out, "%d", all[0]);
    } else {
        buf_byte(out, '{');
        for (int i = 0; i < m;) {
            int end = i;
            while (end + 1 < m && all[end + 1] == all[end] + 1) end++;
            buf_printf(out, "%s%d", i ? "," : "", all[i]);
            if (end > i) buf_printf(out, "%c%d", end > i + 1 ? '-' : ',', all[end]);
            i = end + 1;
        }
        buf_byte(out, '}');
    }
    free(all);
}

void finding_objects(buf *out, const finding *x, int most) {
    shape *v = xmalloc((size_t)(x->count + 1) * sizeof *v);
    for (int i = 0; i < x->count; i++) v[i] = take_shape(x->objects[i]);
    if (x->count) qsort(v, (size_t)x->count, sizeof *v, by_text);
    int patterns = 0, rest = 0;
    for (int i = 0; i < x->count;) {
        int n = 1;
        while (i + n < x->count && str_eq(v[i + n].text, v[i].text)) n++;
        if (patterns++ < most) {
            if (patterns > 1) buf_puts(out, ", ");
            int which = 0;
            for (size_t k = 0; k < v[i].text.n; k++)
                if (v[i].text.p[k] == 1 && which < v[i].n)
                    put_numbers(out, v + i, n, which++);
                else
                    buf_byte(out, (unsigned char)v[i].text.p[k] < 0x20 ? '?' : v[i].text.p[k]);
        } else {
            rest += n;
        }
        i += n;
    }
    if (rest) buf_printf(out, " and %d more", rest);
    for (int i = 0; i < x->count; i++) free((void *)(uintptr_t)v[i].text.p);
    free(v);
}
