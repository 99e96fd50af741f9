#include "model/fields.h"

#include <stdio.h>

const json *field_get(const fields *f, const char *key) {
    const json *v = json_get(f->inner, key);
    if (!v || v->type == JSON_NULL) v = json_get(f->outer, key);
    return v && v->type != JSON_NULL ? v : NULL;
}

/* A value as it reads in a message: short, containers abbreviated. */
static void value_text(char *out, size_t n, const json *v) {
    if (v->type == JSON_ARRAY || v->type == JSON_OBJECT) {
        snprintf(out, n, v->type == JSON_ARRAY ? "a list of %u" : "an object of %u", v->n);
        return;
    }
    if (v->type == JSON_STRING) {
        snprintf(out, n, "\"%.40s\"%s", v->u.s, v->n > 40 ? "..." : "");
        return;
    }
    buf b = { 0 };
    json_write(&b, v);
    snprintf(out, n, "%.40s", b.p ? b.p : "");
    buf_free(&b);
}

bool field_refuse(const fields *f, const char *id, const char *key, const json *v, const char *why, err *e) {
    char text[64];
    value_text(text, sizeof text, v);
    return fail(e, ERR_INPUT, id, "%s/%s: %s: %s %s", f->dir, f->file, key, text, why);
}

bool field_bad(const fields *f, const char *key, const json *v, const char *want, err *e) {
    char text[64];
    value_text(text, sizeof text, v);
    return fail(e, ERR_INPUT, "E-CONFIG-FIELD", "%s/%s: %s: %s is not %s", f->dir, f->file, key, text, want);
}

bool field_missing(const fields *f, const char *key, err *e) {
    return fail(e, ERR_INPUT, "E-CONFIG-FIELD", "%s/%s: %s is missing", f->dir, f->file, key);
}

bool field_int_opt(const fields *f, const char *key, int lo, int hi, int *out, bool *found, err *e) {
    const json *v = field_get(f, key);
    if (found) *found = v != NULL;
    if (!v) return true;
    if (v->type != JSON_INT || v->u.i < lo || v->u.i > hi) {
        char want[64];
        snprintf(want, sizeof want, "a whole number from %d to %d", lo, hi);
        return field_bad(f, key, v, want, e);
    }
    *out = (int)v->u.i;
    return true;
}

bool field_double_opt(const fields *f, const char *key, double lo, double hi, double *out, bool *found, err *e) {
    const json *v = field_get(f, key);
    if (found) *found = v != NULL;
    if (!v) return true;
    const double d = json_is_number(v) ? json_double(v) : 0;
    if (!json_is_number(v) || !(d >= lo && d <= hi)) {
        char want[64];
        snprintf(want, sizeof want, "a number from %g to %g", lo, hi);
        return field_bad(f, key, v, want, e);
    }
    *out = d;
    return true;
}

bool field_bool_opt(const fields *f, const char *key, bool *out, bool *found, err *e) {
    const json *v = field_get(f, key);
    if (found) *found = v != NULL;
    if (!v) return true;
    if (!json_is_bool(v)) return field_bad(f, key, v, "true or false", e);
    *out = v->type == JSON_TRUE;
    return true;
}

bool field_str_opt(const fields *f, const char *key, str *out, err *e) {
    const json *v = field_get(f, key);
    *out = (str){ 0 };
    if (!v) return true;
    if (v->type != JSON_STRING) return field_bad(f, key, v, "a text", e);
    *out = json_str(v);
    return true;
}

bool field_int(const fields *f, const char *key, int lo, int hi, int *out, err *e) {
    bool found;
    if (!field_int_opt(f, key, lo, hi, out, &found, e)) return false;
    return found || field_missing(f, key, e);
}

bool field_double(const fields *f, const char *key, double lo, double hi, double *out, err *e) {
    bool found;
    if (!field_double_opt(f, key, lo, hi, out, &found, e)) return false;
    return found || field_missing(f, key, e);
}
