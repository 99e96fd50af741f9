#include "model/config_rope.h"

#include <math.h>

#include "base/log.h"

enum { MAX_POSITION = 1 << 24 };

/* Fields of `rope_scaling`, then of `rope_parameters`; theta and the rotary share also stand at text level in older
 * files. A file that was given `rope_scaling` on top of `rope_parameters` means the former. */
typedef struct rope_fields {
    fields rope;
    const fields *text;
} rope_fields;

static const char *where(const rope_fields *r) { return r->rope.file; }

static bool rope_double(const rope_fields *r, const char *key, double lo, double hi, double *out, bool *found, err *e) {
    if (!field_double_opt(&r->rope, key, lo, hi, out, found, e)) return false;
    return *found || field_double_opt(r->text, key, lo, hi, out, found, e);
}

static bool open_rope(rope_fields *r, const fields *text, err *e) {
    const json *scaling = field_get(text, "rope_scaling"), *params = field_get(text, "rope_parameters");
    if (scaling && scaling->type != JSON_OBJECT) return field_bad(text, "rope_scaling", scaling, "an object", e);
    if (params && params->type != JSON_OBJECT) return field_bad(text, "rope_parameters", params, "an object", e);
    if (scaling && params)
        log_say("N-CONFIG-ROPE", "%s/%s: rope_scaling and rope_parameters are both present: fields of rope_scaling win",
                text->dir, text->file);
    *r = (rope_fields){ .rope = { .inner = scaling ? scaling : params,
                                  .outer = scaling ? params : NULL,
                                  .dir = text->dir,
                                  .file = text->file },
                        .text = text };
    return true;
}

static bool read_kind(model_config *c, const rope_fields *r, err *e) {
    str type, old;
    if (!field_str_opt(&r->rope, "rope_type", &type, e) || !field_str_opt(&r->rope, "type", &old, e)) return false;
    if (!type.p) type = old.p ? old : STR("default");
    c->rope_scaling = 1;
    if (str_is(type, "yarn")) return c->rope = ROPE_YARN, true;
    if (!str_is(type, "default") && !str_is(type, "mrope"))
        return fail(e, ERR_INPUT, "E-CONFIG-ROPE",
                    "%s/%s: rope_type: \"%.40s\" is not supported (default, mrope or yarn)", r->rope.dir, where(r),
                    type.p);
    const json *factor = field_get(&r->rope, "factor");
    if (factor && !(json_is_number(factor) && json_double(factor) == 1.0))
        log_say("N-CONFIG-ROPE", "%s/%s: rope factor is ignored: rope_type is \"%.40s\", not \"yarn\"", r->rope.dir,
                where(r), type.p);
    return true;
}

static bool read_dims(model_config *c, const rope_fields *r, err *e) {
    bool found;
    double share = 0.25;
    if (!rope_double(r, "rope_theta", 1.0 + 1e-6, 1e15, &c->rope_theta, &found, e)) return false;
    if (!found) return field_missing(r->text, "rope_theta (in rope_parameters)", e);
    if (!rope_double(r, "partial_rotary_factor", 0, 1, &share, &found, e)) return false;
    c->rotary_dim = (int)(c->head_dim * share); /* truncated, as int() does */
    if (c->rotary_dim < 2 || c->rotary_dim % 2)
        return fail(
            e, ERR_INPUT, "E-CONFIG-ROPE",
            "%s/%s: partial_rotary_factor: %g of head_dim %d makes %d rotary dimensions (an even number from 2 on)",
            r->rope.dir, where(r), share, c->head_dim, c->rotary_dim);
    return true;
}

/* Interleaved M-RoPE: frequency i belongs to H when i % 3 == 1 and i < 3 * section[1], to W when i % 3 == 2 and
 * i < 3 * section[2], else to T. Text has equal positions on all axes, so this is plain RoPE there. */
static bool read_axes(model_config *c, const rope_fields *r, err *e) {
    const int half = c->rotary_dim / 2;
    const json *v = field_get(&r->rope, "mrope_section");
    bool interleaved = true, found;
    if (!field_bool_opt(&r->rope, "mrope_interleaved", &interleaved, &found, e)) return false;
    int section[3] = { 11, 11, 10 }, sum = 0; /* transformers' default, meant for 32 frequencies */
    if (!v && (half != 32 || c->is_next)) return true;
    if (found && !interleaved)
        return fail(e, ERR_INPUT, "E-CONFIG-ROPE",
                    "%s/%s: mrope_interleaved: false is not supported (this family interleaves)", r->rope.dir,
                    where(r));
    if (v && (v->type != JSON_ARRAY || v->n != 3))
        return field_bad(&r->rope, "mrope_section", v, "a list of three numbers", e);
    for (int i = 0; v && i < 3; i++) {
        const json *s = &v->u.items[i];
        if (s->type != JSON_INT || s->u.i < 0 || s->u.i > half)
            return field_bad(&r->rope, "mrope_section", s, "a count of rotary frequencies", e);
        sum += section[i] = (int)s->u.i;
    }
    if (v && sum != half)
        return fail(e, ERR_INPUT, "E-CONFIG-ROPE",
                    "%s/%s: mrope_section: [%d, %d, %d] sums to %d, but there are %d rotary frequencies", r->rope.dir,
                    where(r), section[0], section[1], section[2], sum, half);
    for (int i = 0; i < half; i++) {
        const int axis = i % 3;
        c->rope_axis[i] = (uint8_t)(axis && i < 3 * section[axis] ? axis : 0);
    }
    return true;
}

/* fl(theta ^ fl(2i / dim)): the power is taken in double and rounded once, which is the float32 power of an accurate
 * libm and the same on every machine. */
static float pos_freq(const model_config *c, int i) {
    const float exponent = (float)(2 * i) / (float)c->rotary_dim;
    return (float)pow((double)(float)c->rope_theta, (double)exponent);
}

typedef struct yarn {
    double factor, beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor;
    int original;
    bool truncate, has_attention;
} yarn;

static bool read_yarn(yarn *y, const model_config *c, const rope_fields *r, err *e) {
    bool has_factor, has_original, found;
    *y = (yarn){ .original = c->max_position, .truncate = true };
    if (!field_int_opt(&r->rope, "original_max_position_embeddings", 1, MAX_POSITION, &y->original, &has_original, e) ||
        !field_double_opt(&r->rope, "factor", 1, 1024, &y->factor, &has_factor, e) ||
        !field_double_opt(&r->rope, "beta_fast", 0, 1e6, &y->beta_fast, &found, e) ||
        !field_double_opt(&r->rope, "beta_slow", 0, 1e6, &y->beta_slow, &found, e) ||
        !field_double_opt(&r->rope, "mscale", 0, 100, &y->mscale, &found, e) ||
        !field_double_opt(&r->rope, "mscale_all_dim", 0, 100, &y->mscale_all_dim, &found, e) ||
        !field_double_opt(&r->rope, "attention_factor", 1e-3, 100, &y->attention_factor, &y->has_attention, e) ||
        !field_bool_opt(&r->rope, "truncate", &y->truncate, &found, e))
        return false;
    if (y->beta_fast == 0) y->beta_fast = 32;
    if (y->beta_slow == 0) y->beta_slow = 1;
    const double implied = (double)c->max_position / y->original;
    if (!has_factor && (!has_original || implied < 1 || implied > 1024))
        return field_missing(&r->rope, "factor (rope_type yarn)", e);
    if (!has_factor) y->factor = implied;
    return true;
}

static double yarn_mscale(double scale, double mscale) { return scale <= 1 ? 1.0 : 0.1 * mscale * log(scale) + 1.0; }

/* The rotary dimension at which a frequency turns `rotations` times within the original context. */
static double yarn_dim(const model_config *c, const yarn *y, double rotations) {
    const double pi = 3.14159265358979323846;
    return (c->rotary_dim * log(y->original / (rotations * 2 * pi))) / (2 * log(c->rope_theta));
}

/* Step by step and rounding by rounding as transformers 5 `_compute_yarn_parameters` does in float32 tensors with
 * Python (double) scalars. */
static void yarn_frequencies(model_config *c, const yarn *y) {
    double low = yarn_dim(c, y, y->beta_fast), high = yarn_dim(c, y, y->beta_slow);
    if (y->truncate) low = floor(low), high = ceil(high);
    low = low > 0 ? low : 0;
    high = high < c->rotary_dim - 1 ? high : c->rotary_dim - 1;
    if (low == high) high += 0.001;
    const float lo = (float)low, span = (float)(high - low), factor = (float)y->factor;
    for (int i = 0; i < c->rotary_dim / 2; i++) {
        const float freq = pos_freq(c, i), extrapolated = 1.0f / freq, scaled = factor * freq,
                    interpolated = 1.0f / scaled;
        float ramp = ((float)i - lo) / span;
        ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
        const float keep = 1.0f - ramp, mix = 1.0f - keep;
        const float a = interpolated * mix, b = extrapolated * keep;
        c->inv_freq[i] = a + b;
    }
    c->yarn_factor = y->factor;
    double attention = y->attention_factor;
    if (!y->has_attention)
        attention = y->mscale != 0 && y->mscale_all_dim != 0
                        ? yarn_mscale(y->factor, y->mscale) / yarn_mscale(y->factor, y->mscale_all_dim)
                        : yarn_mscale(y->factor, 1);
    c->rope_scaling = (float)attention;
}

bool config_read_rope(model_config *c, const fields *text, err *e) {
    rope_fields r;
    if (!open_rope(&r, text, e) || !read_kind(c, &r, e) || !read_dims(c, &r, e) || !read_axes(c, &r, e)) return false;
    if (c->rope != ROPE_YARN) {
        for (int i = 0; i < c->rotary_dim / 2; i++) c->inv_freq[i] = 1.0f / pos_freq(c, i);
        return true;
    }
    yarn y;
    if (!read_yarn(&y, c, &r, e)) return false;
    const double reach = y.factor * y.original;
    if (reach > MAX_POSITION)
        return fail(e, ERR_INPUT, "E-CONFIG-ROPE", "%s/%s: yarn factor %g times %d positions is beyond %d", r.rope.dir,
                    where(&r), y.factor, y.original, (int)MAX_POSITION);
    if (c->max_position != y.original && fabs(reach - c->max_position) > 0.5)
        log_say("N-CONFIG-ROPE",
                "%s/%s: yarn factor %g times %d positions is not max_position_embeddings %d: the factor counts",
                r.rope.dir, where(&r), y.factor, y.original, c->max_position);
    if (reach > c->max_position) c->max_position = (int)reach;
    yarn_frequencies(c, &y);
    return true;
}
