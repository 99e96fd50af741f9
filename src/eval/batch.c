#include "eval/batch.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

typedef struct run run;
typedef struct seat { /* one of the prompts in work: its callbacks' context */
    run *r;
    batch_item *item;
} seat;

struct run {
    const batch_options *o;
    batch_item *items;
    loop *l;
    seat *seats;
    int n, next, done;
};

static bool on_token(void *ctx, int choice, int32_t id, double logprob, const int32_t *top, const double *values) {
    (void)choice, (void)logprob, (void)top, (void)values;
    ids_add(&((seat *)ctx)->item->output, id);
    return true;
}

static void on_done(void *ctx, int choice, const gen_result *r, const err *e);

/* The next prompt takes the seat. A request that is refused counts as answered with its error. */
static void sit(seat *s) {
    run *r = s->r;
    while (r->next < r->n) {
        batch_item *i = s->item = &r->items[r->next++];
        const loop_request q = { .prompt = i->prompt,
                                 .n_prompt = i->n_prompt,
                                 .sampling = i->sampling,
                                 .max_tokens = i->max_tokens,
                                 .depth = -1,
                                 .stop_ids = r->o->stop_ids,
                                 .n_stop_ids = r->o->n_stop_ids,
                                 .on_token = on_token,
                                 .on_done = on_done,
                                 .ctx = s };
        if (loop_submit(r->l, NULL, &q, &i->error)) return;
        i->done = true;
        r->done++;
        if (r->o->on_item) r->o->on_item(r->o->ctx, (int)(i - r->items), r->done);
    }
    s->item = NULL;
}

static void on_done(void *ctx, int choice, const gen_result *res, const err *e) {
    seat *s = ctx;
    run *r = s->r;
    (void)choice;
    s->item->result = *res;
    s->item->error = *e;
    s->item->done = true;
    r->done++;
    if (r->o->on_item) r->o->on_item(r->o->ctx, (int)(s->item - r->items), r->done);
    if (!(r->o->cancel && *r->o->cancel)) sit(s);
}

bool batch_run(engine *g, batch_item *items, int n, const batch_options *o, double *seconds, err *e) {
    run r = { .o = o, .items = items, .n = n };
    const int seats = o->concurrency < n ? o->concurrency : n;
    const loop_options lo = { .depth = o->depth, .fixed_depth = true };
    const double start = clock_seconds();
    *seconds = 0;
    if (n == 0) return true;
    if (!loop_open(&r.l, g, &lo, e)) return false;
    r.seats = xcalloc((size_t)seats, sizeof *r.seats);
    for (int i = 0; i < seats; i++) {
        r.seats[i].r = &r;
        sit(&r.seats[i]);
    }
    while (r.done < n && !(o->cancel && *o->cancel) && loop_step(r.l)) {
    }
    *seconds = clock_seconds() - start;
    const bool stopped = o->cancel && *o->cancel;
    r.next = n; /* what loop_close cancels has no successor */
    loop_close(r.l);
    free(r.seats);
    return !stopped || fail(e, ERR_INTERRUPTED, "E-EVAL-STOPPED", "eval: stopped");
}

void batch_free(batch_item *items, int n) {
    for (int i = 0; i < n; i++) ids_free(&items[i].output);
}
