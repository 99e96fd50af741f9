/* nibble logits: teacher-forced logits and hidden states of given token ids. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "cmd/cmd.h"
#include "engine/teacher.h"

static const char *const act_choices[] = { "auto", "fp4", "int8", "bf16", NULL };

typedef struct options {
    const char *ids, *out;
    bool hidden, mtp;
    int last, act, kv, ctx;
} options;

typedef struct sequences {
    id_list *v;
    int n, longest;
} sequences;

static bool add_sequence(sequences *s, const json *v, const char *what, err *e) {
    s->v = xrealloc(s->v, (size_t)(s->n + 1) * sizeof *s->v);
    id_list *one = &s->v[s->n];
    *one = (id_list){ 0 };
    s->n++;
    for (uint32_t i = 0; i < v->n; i++) {
        const json *x = &v->u.items[i];
        if (!json_is(x, JSON_INT) || x->u.i < 0 || x->u.i > INT32_MAX)
            return fail(e, ERR_INPUT, "E-CMD-IDS", "%s: sequence %d, element %u is not a token id", what, s->n - 1, i);
        ids_add(one, (int32_t)x->u.i);
    }
    if (one->n == 0) return fail(e, ERR_INPUT, "E-CMD-IDS", "%s: sequence %d is empty", what, s->n - 1);
    if ((int)one->n > s->longest) s->longest = (int)one->n;
    return true;
}

/* A list of ids, a list of lists, or an object with `sequences`. */
static bool read_sequences(sequences *s, const char *path, err *e) {
    arena mem = { 0 };
    const json *v;
    bool ok = json_parse_file(&v, &mem, path, NULL, e);
    if (ok && json_is(v, JSON_OBJECT)) v = json_get(v, "sequences");
    if (ok && (!json_is(v, JSON_ARRAY) || v->n == 0))
        ok = fail(e, ERR_INPUT, "E-CMD-IDS",
                  "%s: expected a list of token ids, a list of lists, or an object with `sequences`", path);
    if (ok && v->u.items[0].type != JSON_ARRAY) {
        ok = add_sequence(s, v, path, e);
    } else {
        for (uint32_t i = 0; ok && i < v->n; i++)
            ok = json_is(&v->u.items[i], JSON_ARRAY)
                     ? add_sequence(s, &v->u.items[i], path, e)
                     : fail(e, ERR_INPUT, "E-CMD-IDS", "%s: element %u is no list (ids and lists are mixed)", path, i);
    }
    arena_free(&mem);
    return ok;
}

/* The tensors of one sequence, in the order in which they are computed and written. */
typedef struct plan {
    st_out *t;
    char (*names)[40];
    int n;
} plan;

static void plan_add(plan *p, int seq, const char *what, int rows, int cols) {
    snprintf(p->names[p->n], sizeof p->names[0], "%d.%s", seq, what);
    p->t[p->n] = (st_out){ .name = p->names[p->n], .type = DT_F32, .rank = 2, .shape = { rows, cols } };
    p->n++;
}

static int kept_rows(const options *o, int n) { return o->last > 0 && o->last < n ? o->last : n; }

static plan make_plan(const options *o, const sequences *s, const model_config *c) {
    const size_t each = (size_t)(o->hidden ? c->layers + 1 : 0) + 1 + (o->mtp ? 3 : 0), all = each * (size_t)s->n;
    plan p = { xcalloc(all, sizeof *p.t), xcalloc(all, sizeof *p.names), 0 };
    for (int i = 0; i < s->n; i++) {
        const int rows = kept_rows(o, (int)s->v[i].n);
        char name[32];
        for (int k = 0; o->hidden && k < c->layers; k++) {
            snprintf(name, sizeof name, "hidden.%d", k);
            plan_add(&p, i, name, rows, c->hidden);
        }
        if (o->hidden) plan_add(&p, i, "final_norm", rows, c->hidden);
        plan_add(&p, i, "logits", rows, c->vocab);
        if (o->mtp) {
            plan_add(&p, i, "mtp1.hidden", rows, c->hidden);
            plan_add(&p, i, "mtp1.logits", rows, c->vocab);
            plan_add(&p, i, "mtp2.logits", rows, c->vocab);
        }
    }
    return p;
}

static bool write_hidden(st_writer *w, const float *first, int skip, int rows, int h, err *e) {
    return st_writer_add(w, first + (int64_t)skip * h, (size_t)rows * (size_t)h * sizeof *first, e);
}

static bool write_logits(st_writer *w, engine *g, const float *hidden, int skip, int rows, err *e) {
    enum { PIECE = 64 };
    const int h = g->config.hidden, v = g->config.vocab;
    float *logits = malloc((size_t)PIECE * (size_t)v * sizeof *logits);
    if (!logits) return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "no memory for %d rows of logits", PIECE);
    bool ok = true;
    for (int r = 0; ok && r < rows; r += PIECE) {
        const int m = rows - r < PIECE ? rows - r : PIECE;
        ok = teacher_logits(g, logits, hidden + (int64_t)(skip + r) * h, m, e) &&
             st_writer_add(w, logits, (size_t)m * (size_t)v * sizeof *logits, e);
    }
    free(logits);
    return ok;
}

static bool one_sequence(st_writer *w, const options *o, engine *g, const id_list *tokens, err *e) {
    const int n = (int)tokens->n, rows = kept_rows(o, n), skip = n - rows, h = g->config.hidden;
    teacher_result r;
    if (!teacher_run(&r, g, tokens->v, n, o->hidden, o->mtp, e)) return false;
    bool ok = true;
    for (int k = 0; ok && o->hidden && k < g->config.layers; k++)
        ok = write_hidden(w, r.hidden + (int64_t)k * n * h, skip, rows, h, e);
    ok = ok && (!o->hidden || write_hidden(w, r.final_norm, skip, rows, h, e)) &&
         write_logits(w, g, r.final_norm, skip, rows, e);
    if (ok && o->mtp)
        ok = write_hidden(w, r.mtp1, skip, rows, h, e) && write_logits(w, g, r.mtp1, skip, rows, e) &&
             write_logits(w, g, r.mtp2, skip, rows, e);
    teacher_free(&r);
    return ok;
}

static bool run(const options *o, const char *dir, err *e) {
    sequences s = { 0 };
    engine *g = NULL;
    st_writer w = { 0 };
    plan p = { 0 };
    const double t0 = clock_seconds();
    bool ok = read_sequences(&s, o->ids, e);
    const engine_options eo = { .ops = cmd_ops_options(),
                                .ctx = o->ctx ? o->ctx : s.longest,
                                .slots = o->mtp ? 2 : 1,
                                .kv = (kv_mode)o->kv,
                                .act = (act_mode)o->act,
                                .no_text = true };
    ok = ok && engine_open(&g, dir, &eo, e);
    if (ok && o->mtp && !g->n.has_mtp)
        ok = fail(e, ERR_INPUT, "E-LOAD-NO-HEAD", "%s: --mtp asked for, but the checkpoint has no draft head", dir);
    if (ok) {
        p = make_plan(o, &s, &g->config);
        ok = st_writer_open(&w, o->out, p.t, p.n, e);
        for (int i = 0; ok && i < s.n; i++) ok = one_sequence(&w, o, g, &s.v[i], e) || fail_prefix(e, "sequence %d", i);
        if (ok)
            ok = st_writer_commit(&w, e);
        else
            st_writer_abort(&w);
    }
    if (ok && cmd_common()->json)
        printf("{\"schema\":\"nibble.logits/"
               "1\",\"sequences\":%d,\"tensors\":%d,\"kv\":\"%s\",\"act\":\"%s\",\"seconds\":%.3f}\n",
               s.n, p.n, dtype_name(g->kv_type), act_choices[o->act], clock_seconds() - t0);
    else if (ok && !cmd_common()->quiet)
        fprintf(stderr, "%d sequences, %d tensors -> %s (KV %s, act %s)\n", s.n, p.n, o->out, dtype_name(g->kv_type),
                act_choices[o->act]);
    free(p.t);
    free(p.names);
    engine_close(g);
    for (int i = 0; i < s.n; i++) ids_free(&s.v[i]);
    free(s.v);
    return ok;
}

int cmd_logits(int argc, char **argv, err *e) {
    static const char *const kv_choices[] = { "auto", "f32", "bf16", "fp8", NULL };
    options o = { 0 };
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Logits" },
        { .type = ARG_STR,
          .name = "ids",
          .meta = "FILE",
          .dst = &o.ids,
          .help = "JSON: a list of token ids, a list of lists, or an object with `sequences`" },
        { .type = ARG_STR,
          .name = "output",
          .key = 'o',
          .meta = "FILE",
          .dst = &o.out,
          .help = "safetensors to write: \"<i>.logits\" [T, V] and what else is asked for" },
        { .type = ARG_FLAG,
          .name = "hidden",
          .dst = &o.hidden,
          .help = "also \"<i>.hidden.<k>\" (input of layer k) and \"<i>.final_norm\"" },
        { .type = ARG_FLAG,
          .name = "mtp",
          .dst = &o.mtp,
          .help = "also the draft head, teacher-forced: mtp1.hidden, mtp1.logits, mtp2.logits" },
        { .type = ARG_INT,
          .name = "last",
          .meta = "N",
          .dst = &o.last,
          .lo = 1,
          .hi = INT32_MAX,
          .none = "all",
          .help = "keep the last N positions" },
        { .type = ARG_ENUM,
          .name = "act",
          .dst = &o.act,
          .choices = act_choices,
          .help = "activations of quantized linears" },
        { .type = ARG_ENUM,
          .name = "kv",
          .dst = &o.kv,
          .choices = kv_choices,
          .help = "KV cache type; auto is f32 for BF16 models" },
        { .type = ARG_INT,
          .name = "ctx",
          .meta = "N",
          .dst = &o.ctx,
          .lo = 1,
          .hi = 1 << 30,
          .none = "as long as needed",
          .help = "context size in tokens" },
    };
    const arg_spec spec = { .usage = "logits [options] [MODEL_DIR] --ids FILE -o OUT.safetensors",
                            .about = "Teacher-forced logits and hidden states in float32. Needs no tokenizer files.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .max_positional = 1,
                            .examples =
                                "  nibble logits --ids ids.json -o logits.safetensors\n"
                                "  nibble logits MODEL --ids ids.json -o all.safetensors --hidden --mtp --last 64\n" };
    arg_strings pos = { 0 };
    bool done;
    const char *dir;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done) {
        if (!o.ids || !o.out)
            fail(e, ERR_USAGE, "E-USAGE", "logits: --ids FILE and -o FILE are needed");
        else if (cmd_model_dir(&dir, &pos, 0, e) && !run(&o, dir, e))
            CHECK(e->kind != ERR_NONE, "a failure without a reason");
    }
    arg_strings_free(&pos);
    return 0;
}
