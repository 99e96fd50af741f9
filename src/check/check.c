#include "check/check.h"

#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "model/weights.h"

static void drop_line(void *ctx, const char *id, const char *line) { (void)ctx, (void)id, (void)line; }

/* What nibble's own loader says in warnings, where no rule here says it better. */
static void keep_warning(void *ctx, const char *id, const char *line) {
    static const char *const ours[] = { "W-LOAD-GROUP", "W-LOAD-KV-SCALE", "W-LOAD-KV-UNDECLARED", "W-CKPT-TOTAL" };
    if (id[0] != 'W') return;
    for (size_t i = 0; i < ARRAY_LEN(ours); i++)
        if (strcmp(id, ours[i]) == 0) return;
    const char *text = strstr(line, id);
    finding_add(ctx, "C-LOAD-WARNING", id, str_of(id), "%s", text ? text + strlen(id) + 2 : line);
}

/* The loader's own verdict. It stops at its first fault, so it is a finding only when no rule found that fault. */
static void try_loading(check_report *r) {
    ckpt c;
    model_config config;
    log_set_sink(keep_warning, &r->found);
    r->loads = ckpt_open(&c, r->view.dir, &r->refused);
    if (r->loads) {
        r->loads =
            config_read(&config, c.config, c.generation, c.dir, &r->refused) && weights_check(&c, &config, &r->refused);
        ckpt_close(&c);
    }
    log_set_sink(NULL, NULL);
    if (!r->loads && !findings_of(&r->found, SEV_ERROR))
        finding_add(&r->found, "C-LOAD-REFUSED", NULL, str_of(r->refused.id), "nibble does not load it: %s",
                    r->refused.msg);
}

bool check_run(check_report *out, const char *dir, const check_options *o, err *e) {
    const double start = clock_seconds();
    const check_progress progress = { o->on_progress, o->ctx, o->cancel };
    pool *p = NULL;
    *out = (check_report){ 0 };
    log_set_sink(drop_line, NULL);
    bool ok = view_open(&out->view, dir, &out->found, e) && pool_new(&p, o->threads, e);
    if (ok) {
        view_layout(&out->view);
        view_declared(&out->view);
        view_text(&out->view);
        ok = view_values(&out->view, p, &progress, e);
        out->bytes = out->view.bytes;
    }
    if (ok && o->source) {
        ok = view_compare(&out->with, &out->view, o->source, p, o->isa, &progress, e);
        out->bytes += out->view.bytes + out->with.source_bytes;
    }
    log_set_sink(NULL, NULL);
    if (ok) try_loading(out);
    for (int i = 0; ok && i < o->n_targets; i++) target_predict(&o->targets[i], &out->view);
    out->targets = o->targets;
    out->n_targets = o->n_targets;
    if (p) pool_free(p);
    findings_sort(&out->found);
    out->seconds = clock_seconds() - start;
    return ok;
}

void check_free(check_report *r) {
    findings_free(&r->found);
    view_close(&r->view);
    *r = (check_report){ 0 };
}

const char *check_verdict(const check_report *r) {
    int errors = findings_of(&r->found, SEV_ERROR);
    for (int i = 0; i < r->found.n && errors; i++) /* the checkpoint itself, or only an engine? */
        if (r->found.v[i].severity == SEV_ERROR && strncmp(r->found.v[i].rule, "C-TARGET-", 9) != 0) return "broken";
    return errors                                ? "sound, but not for a target"
           : findings_of(&r->found, SEV_WARNING) ? "sound with warnings"
                                                 : "sound";
}
