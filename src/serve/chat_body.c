/* Reading JSON bodies: every field is absent, null or right; anything else names the field. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve/chat.h"

const json *body_get(const json *body, const char *name) {
    const json *v = json_get(body, name);
    return json_is(v, JSON_NULL) ? NULL : v;
}

bool body_int(const json *body, const char *name, int64_t lo, int64_t hi, int *out, fault *f) {
    const json *v = body_get(body, name);
    if (!v) return true;
    double d = v->type == JSON_REAL ? json_double(v) : 0;
    if (v->type == JSON_INT) {
        if (v->u.i >= lo && v->u.i <= hi) return *out = (int)v->u.i, true;
    } else if (v->type != JSON_REAL || d != floor(d)) {
        return fault_field(f, name, "%s must be an integer", name);
    } else if (d >= (double)lo && d <= (double)hi) {
        return *out = (int)d, true;
    }
    return fault_field(f, name, "%s must be from %lld to %lld", name, (long long)lo, (long long)hi);
}

bool body_double(const json *body, const char *name, double lo, double hi, double *out, fault *f) {
    const json *v = body_get(body, name);
    if (!v) return true;
    if (!json_is_number(v)) return fault_field(f, name, "%s must be a number", name);
    const double d = json_double(v);
    if (!(d >= lo && d <= hi)) return fault_field(f, name, "%s must be from %g to %g", name, lo, hi);
    return *out = d, true;
}

bool body_bool(const json *body, const char *name, bool *out, fault *f) {
    const json *v = body_get(body, name);
    if (!v) return true;
    if (!json_is_bool(v)) return fault_field(f, name, "%s must be true or false", name);
    return *out = v->type == JSON_TRUE, true;
}

bool body_str(const json *body, const char *name, str *out, fault *f) {
    const json *v = body_get(body, name);
    if (!v) return true;
    if (!json_is(v, JSON_STRING)) return fault_field(f, name, "%s must be a string", name);
    return *out = json_str(v), true;
}

bool body_object(const json *body, const char *name, const json **out, fault *f) {
    const json *v = body_get(body, name);
    if (!v) return true;
    if (!json_is(v, JSON_OBJECT)) return fault_field(f, name, "%s must be an object", name);
    return *out = v, true;
}

bool body_array(const json *body, const char *name, const json **out, fault *f) {
    const json *v = body_get(body, name);
    if (!v) return true;
    if (!json_is(v, JSON_ARRAY)) return fault_field(f, name, "%s must be an array", name);
    return *out = v, true;
}

/* ---- sampling ---- */

static bool read_stop(chat_request *r, const json *v, const char *param, fault *f) {
    if (!json_is(v, JSON_STRING)) return fault_field(f, param, "%s must be a string or a list of strings", param);
    const str s = json_str(v);
    if (s.n == 0) return fault_field(f, param, "%s must not hold an empty string", param);
    if (s.n > 1024 || memchr(s.p, 0, s.n))
        return fault_field(f, param, "%s: a stop string has at most 1024 bytes and no NUL", param);
    if (r->n_stops == CHAT_MAX_STOPS) return fault_field(f, param, "%s: at most %d strings", param, CHAT_MAX_STOPS);
    r->stops[r->n_stops++] = chat_copy(r->mem, s).p;
    return true;
}

bool chat_read_stops(chat_request *r, const json *body, const char *param, fault *f) {
    const json *v = body_get(body, param);
    if (!v) return true;
    if (!json_is(v, JSON_ARRAY)) return read_stop(r, v, param, f);
    for (uint32_t i = 0; i < v->n; i++)
        if (!read_stop(r, &v->u.items[i], param, f)) return false;
    return true;
}

static bool read_stop_ids(chat_request *r, const json *body, int vocab, fault *f) {
    const json *v = NULL;
    if (!body_array(body, "stop_token_ids", &v, f)) return false;
    if (!v || v->n == 0) return true;
    if (v->n > 64) return fault_field(f, "stop_token_ids", "stop_token_ids: at most 64");
    int32_t *ids = arena_take(r->mem, v->n, sizeof *ids);
    if (!ids) return fault_set(f, 503, NULL, "no memory for the request");
    for (uint32_t i = 0; i < v->n; i++) {
        const json *x = &v->u.items[i];
        if (!json_is(x, JSON_INT) || x->u.i < 0 || x->u.i >= vocab)
            return fault_field(f, "stop_token_ids", "stop_token_ids: element %u is not a token id (0 to %d)", i,
                               vocab - 1);
        ids[i] = (int32_t)x->u.i;
    }
    r->stop_ids = ids;
    r->n_stop_ids = (int)v->n;
    return true;
}

static bool read_bias(chat_request *r, const json *body, int vocab, fault *f) {
    const json *v = NULL;
    if (!body_object(body, "logit_bias", &v, f)) return false;
    if (!v || v->n == 0) return true;
    if (v->n > 1024) return fault_field(f, "logit_bias", "logit_bias: at most 1024 tokens");
    sampler_bias *b = arena_take(r->mem, v->n, sizeof *b);
    if (!b) return fault_set(f, 503, NULL, "no memory for the request");
    for (uint32_t i = 0; i < v->n; i++) {
        const json_member *m = &v->u.members[i];
        char *end = NULL;
        const long id = m->key.n > 0 && m->key.n < 10 ? strtol(m->key.p, &end, 10) : -1;
        if (id < 0 || id >= vocab || end != m->key.p + m->key.n)
            return fault_field(f, "logit_bias", "logit_bias: '" STR_FMT "' is not a token id (0 to %d)",
                               (int)(m->key.n > 40 ? 40 : m->key.n), m->key.p, vocab - 1);
        const double x = json_is_number(&m->value) ? json_double(&m->value) : NAN;
        if (!(x >= -100 && x <= 100)) return fault_field(f, "logit_bias", "logit_bias: values are from -100 to 100");
        b[i] = (sampler_bias){ (int32_t)id, (float)x };
    }
    r->sampling.bias = b;
    r->sampling.n_bias = (int)v->n;
    return true;
}

static bool read_seed(chat_request *r, const json *body, fault *f) {
    const json *v = body_get(body, "seed");
    if (!v) return true;
    if (!json_is(v, JSON_INT)) return fault_field(f, "seed", "seed must be a 64-bit integer");
    r->sampling.seed = (uint64_t)v->u.i;
    r->has_seed = true;
    return true;
}

bool chat_read_sampling(chat_request *r, const json *body, int vocab, fault *f) {
    sampler_params *p = &r->sampling;
    if (!body_double(body, "temperature", 0, 100, &p->temperature, f) ||
        !body_double(body, "top_p", 0, 1, &p->top_p, f) || !body_double(body, "min_p", 0, 1, &p->min_p, f) ||
        !body_double(body, "presence_penalty", -2, 2, &p->presence, f) ||
        !body_double(body, "frequency_penalty", -2, 2, &p->frequency, f) ||
        !body_double(body, "repetition_penalty", 0.01, 100, &p->repetition, f) ||
        !body_int(body, "top_k", -1, 1 << 24, &p->top_k, f) ||
        !body_int(body, "min_tokens", 0, 1 << 24, &p->min_tokens, f) ||
        !body_bool(body, "ignore_eos", &r->ignore_eos, f))
        return false;
    if (p->top_k < 0) p->top_k = 0; /* -1 is how some clients write "off" */
    return read_seed(r, body, f) && chat_read_stops(r, body, "stop", f) && read_stop_ids(r, body, vocab, f) &&
           read_bias(r, body, vocab, f);
}

void chat_ignored(chat *c, const json *body, const char *const *known) {
    for (uint32_t i = 0; i < body->n; i++) {
        const str key = body->u.members[i].key;
        bool found = false;
        for (const char *const *k = known; *k && !found; k++) found = str_is(key, *k);
        if (found || c->ignored.n > 1000) continue;
        if (c->ignored.n) buf_puts(&c->ignored, ", ");
        for (size_t j = 0; j < key.n && j < 64; j++) /* header text: anything unusual becomes '?' */
            buf_byte(&c->ignored, key.p[j] > 0x20 && key.p[j] < 0x7f && key.p[j] != ',' ? key.p[j] : '?');
    }
}
