#include "engine/history.h"

#include <stdlib.h>
#include <string.h>

bool history_open(history *h, int vocab, err *e) {
    CHECK(vocab > 0, "a history of %d ids", vocab);
    /* calloc and malloc hand out untouched pages: resident memory is what the sequence really used. */
    *h = (history){ .vocab = vocab,
                    .state = calloc((size_t)vocab, sizeof *h->state),
                    .ids = malloc((size_t)vocab * sizeof *h->ids) };
    if (h->state && h->ids) return true;
    history_close(h);
    return fail(e, ERR_MACHINE, "E-MACHINE-MEMORY", "token counts of a sequence: no memory for %d ids", vocab);
}

void history_close(history *h) {
    free(h->state);
    free(h->ids);
    *h = (history){ 0 };
}

void history_reset(history *h) {
    for (int i = 0; i < h->n_ids; i++) h->state[h->ids[i]] = 0;
    h->n_ids = 0;
}

static bool known(const history *h, int32_t id) { return id >= 0 && id < h->vocab; }

static void remember(history *h, int32_t id) {
    if (h->state[id] == 0) h->ids[h->n_ids++] = id;
}

void history_prompt(history *h, const int32_t *ids, int n) {
    for (int i = 0; i < n; i++) {
        if (!known(h, ids[i])) continue;
        remember(h, ids[i]);
        h->state[ids[i]] |= HISTORY_PROMPT;
    }
}

void history_push(history *h, int32_t id) {
    if (!known(h, id)) return;
    remember(h, id);
    h->state[id]++;
}

void history_pop(history *h, int32_t id) {
    if (!known(h, id)) return;
    CHECK(history_count(h, id) > 0, "id %d was not pushed", id);
    if (--h->state[id] > 0) return;
    /* Its first occurrence was the push undone here, so nothing came after it. */
    CHECK(h->n_ids > 0 && h->ids[h->n_ids - 1] == id, "id %d is not the newest", id);
    h->n_ids--;
}
