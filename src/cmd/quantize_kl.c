#include "cmd/quantize_kl.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "cmd/calibration.h"
#include "cmd/cmd.h"

typedef struct reference {
    calib_data texts;
    float *logits;
    int rows, vocab;
} reference;

static bool compare(kl_figures *out, const reference *ref, const char *dir, err *e) {
    const ops_options backend = cmd_ops_options();
    float *got;
    int rows, vocab;
    if (!kl_logits(&got, &rows, &vocab, dir, &ref->texts, &backend, e)) return false;
    CHECK(rows == ref->rows && vocab == ref->vocab, "%s: %d x %d logits", dir, rows, vocab);
    *out = kl_compare(got, ref->logits, rows, vocab);
    free(got);
    return true;
}

/* The same export by the plain rule, on the disk only while it is measured. */
static bool compare_max(kl_figures *out, const reference *ref, plan *p, const char *dst, const quantize_options *o,
                        const provenance *from, err *e) {
    quantize_result r = { 0 };
    quantize_options plain = *o;
    char *partial = NULL, *name = xmalloc(strlen(dst) + 5);
    size_t n = strlen(dst);
    while (n > 1 && dst[n - 1] == '/') n--;
    memcpy(name, dst, n);
    memcpy(name + n, ".max", 5);
    plain.algorithm = QUANT_MAX;
    plain.resume = false;
    plain.rank = 0;
    plain.ranks = 1;
    plain.partial = NULL;
    plain.on_progress = NULL;
    bool ok = quantize_check_dst(p, name, false, e);
    if (ok) {
        const int level = log_level();
        log_set_level(0); /* all was said of the export itself */
        ok = quantize_shards(&r, &partial, p, name, &plain, e) && configs_write(partial, p, from, e) &&
             compare(out, ref, partial, e);
        log_set_level(level);
        quantize_discard(partial);
        quantize_result_free(&r);
    }
    free(partial);
    free(name);
    return ok;
}

bool quantize_kl(kl_figures *got, kl_figures *max, plan *p, const char *src, const char *partial, const char *out,
                 const quantize_options *o, const provenance *from, err *e) {
    const ops_options backend = cmd_ops_options();
    reference ref = { 0 };
    if (!calibration_kl_texts(&ref.texts, src, e)) return false;
    const bool ok = kl_logits(&ref.logits, &ref.rows, &ref.vocab, src, &ref.texts, &backend, e) &&
                    compare(got, &ref, partial, e) &&
                    (o->algorithm == QUANT_MAX || compare_max(max, &ref, p, out, o, from, e));
    free(ref.logits);
    calib_data_free(&ref.texts);
    return ok;
}
