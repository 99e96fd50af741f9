/* config.json and hf_quant_config.json with another draft head: the same trees, the head's own entries exchanged. */
#include <fnmatch.h>
#include <stdlib.h>

#include "base/log.h"
#include "model/names.h"
#include "quant/requant.h"

typedef struct edit {
    const plan *head; /* NULL: none */
    const str *add;   /* [n_add] exclude patterns of the head */
    int n_add;
    bool warn; /* say which patterns reach too far: once, not per file */
} edit;

static bool about_head(str s) { return str_find(s, STR("mtp")) >= 0; }

/* A pattern of the trunk that a stock loader would apply to a quantized Linear of the head too. */
static void check_pattern(const edit *x, const char *pattern) {
    for (int i = 0; x->warn && x->head && i < x->head->n_modules; i++) {
        const qmodule *m = &x->head->modules[i];
        if (m->format == QF_KEEP || fnmatch(pattern, m->name.p, 0) != 0) continue;
        log_say("W-REQUANT-EXCLUDE", "%s: this pattern of the export also excludes " STR_FMT ", which is quantized",
                pattern, STR_ARG(m->name));
        return;
    }
}

static void put_added(pretty *o, const edit *x) {
    for (int i = 0; i < x->n_add; i++) pretty_line(o), json_write_str(&o->b, x->add[i]);
}

/* The new patterns stand where the old head's were, or at the end. */
static void exclude_list(pretty *o, str name, const json *old, const edit *x) {
    bool done = false;
    pretty_key(o, name);
    pretty_open(o, '[');
    for (uint32_t i = 0; old && i < old->n; i++) {
        const json *v = &old->u.items[i];
        if (!about_head(json_str(v))) {
            check_pattern(x, v->u.s);
            pretty_line(o);
            json_write(&o->b, v);
        } else if (!done) {
            put_added(o, x);
            done = true;
        }
    }
    if (!done) put_added(o, x);
    pretty_close(o, ']');
}

static void layer_list(pretty *o, const json *old, const edit *x) {
    pretty_key(o, STR("quantized_layers"));
    pretty_open(o, '{');
    for (uint32_t i = 0; i < old->n; i++)
        if (!name_is_mtp(old->u.members[i].key))
            pretty_key(o, old->u.members[i].key), pretty_tree(o, &old->u.members[i].value);
    if (x->head) configs_layer_entries(o, x->head);
    pretty_close(o, '}');
}

/* A group of a mixed export names its modules; of a uniform one it says "Linear". */
static bool group_is(const json *group, qformat f) {
    const json *bits = json_get(json_get(group, "weights"), "num_bits");
    if (!json_is(bits, JSON_INT) || bits->u.i != (f == QF_FP8 ? 8 : 4)) return false;
    return (json_get(group, "input_activations") == NULL) == (f == QF_NVFP4_W);
}

static int by_text(const void *a, const void *b) { return str_cmp(*(const str *)a, *(const str *)b); }

static void group_targets(pretty *o, const json *group, const json *targets, const edit *x) {
    str *v = xmalloc(((size_t)targets->n + (x->head ? (size_t)x->head->n_modules : 0) + 1) * sizeof *v), last = { 0 };
    int n = 0;
    for (uint32_t i = 0; i < targets->n; i++)
        if (!name_is_mtp(json_str(&targets->u.items[i]))) v[n++] = json_str(&targets->u.items[i]);
    const int first = n;
    for (int i = 0; x->head && i < x->head->n_modules; i++) {
        const qmodule *m = &x->head->modules[i];
        const str name = configs_listed_name(m);
        if (m->format == QF_KEEP || !group_is(group, m->format) || str_eq(name, last)) continue;
        v[n++] = last = name;
    }
    qsort(v + first, (size_t)(n - first), sizeof *v, by_text);
    pretty_strings(o, "targets", v, n);
    free(v);
}

static bool all_strings(const json *v) {
    if (!json_is(v, JSON_ARRAY)) return false;
    for (uint32_t i = 0; i < v->n; i++)
        if (v->u.items[i].type != JSON_STRING) return false;
    return true;
}

static void groups(pretty *o, const json *old, const edit *x, bool mixed) {
    pretty_key(o, STR("config_groups"));
    pretty_open(o, '{');
    for (uint32_t i = 0; i < old->n; i++) {
        const json *group = &old->u.members[i].value;
        pretty_key(o, old->u.members[i].key);
        if (!mixed || !json_is(group, JSON_OBJECT)) {
            pretty_tree(o, group);
            continue;
        }
        pretty_open(o, '{');
        for (uint32_t k = 0; k < group->n; k++) {
            const json_member *m = &group->u.members[k];
            if (str_is(m->key, "targets") && all_strings(&m->value))
                group_targets(o, group, &m->value, x);
            else
                pretty_key(o, m->key), pretty_tree(o, &m->value);
        }
        pretty_close(o, '}');
    }
    pretty_close(o, '}');
}

/* The members of a quantization section; `list` names the exclude list when there is none yet. */
static void section(pretty *o, const json *q, const char *list, const edit *x) {
    const bool mixed = json_is(json_get(q, "quantized_layers"), JSON_OBJECT);
    bool listed = false;
    for (uint32_t i = 0; i < q->n; i++) {
        const json_member *m = &q->u.members[i];
        if (str_is(m->key, "ignore") || str_is(m->key, "exclude_modules")) {
            exclude_list(o, m->key, m->value.type == JSON_ARRAY ? &m->value : NULL, x);
            listed = true;
        } else if (mixed && str_is(m->key, "quantized_layers")) {
            layer_list(o, &m->value, x);
        } else if (str_is(m->key, "config_groups") && m->value.type == JSON_OBJECT) {
            groups(o, &m->value, x, mixed);
        } else {
            pretty_key(o, m->key);
            pretty_tree(o, &m->value);
        }
    }
    if (!listed) exclude_list(o, str_of(list), NULL, x);
}

static bool check_section(const json *q, const char *dir, const char *file, err *e) {
    static const char *const lists[] = { "ignore", "exclude_modules" };
    for (size_t i = 0; i < ARRAY_LEN(lists); i++) {
        const json *v = json_get(q, lists[i]);
        if (v && v->type != JSON_NULL && !all_strings(v))
            return fail(e, ERR_INPUT, "E-REQUANT-CONFIG", "%s/%s: %s: is not a list of names (repair the export)", dir,
                        file, lists[i]);
    }
    return json_is(q, JSON_OBJECT) ||
           fail(e, ERR_INPUT, "E-REQUANT-CONFIG",
                "%s/%s: the quantization section is not an object (repair the export)", dir, file);
}

/* Exports whose trainer dropped the head may also have dropped the count that says there is one. */
static void model_fields(pretty *o, const json *text, bool has_head) {
    bool counted = false;
    for (uint32_t i = 0; i < text->n; i++) {
        const json_member *m = &text->u.members[i];
        const bool count = str_is(m->key, "mtp_num_hidden_layers");
        counted |= count;
        if (count && has_head)
            pretty_raw(o, "mtp_num_hidden_layers", "1");
        else
            pretty_key(o, m->key), pretty_tree(o, &m->value);
    }
    if (!counted && has_head) pretty_raw(o, "mtp_num_hidden_layers", "1");
}

static void config_members(pretty *o, const json *c, const edit *x) {
    const bool nested = json_is(json_get(c, "text_config"), JSON_OBJECT);
    for (uint32_t i = 0; i < c->n; i++) {
        const json_member *m = &c->u.members[i];
        const bool count = !nested && x->head && str_is(m->key, "mtp_num_hidden_layers");
        if (count) continue; /* once, below */
        pretty_key(o, m->key);
        if (str_is(m->key, "quantization_config")) {
            pretty_open(o, '{');
            section(o, &m->value, "ignore", x);
            pretty_close(o, '}');
        } else if (nested && str_is(m->key, "text_config")) {
            pretty_open(o, '{');
            model_fields(o, &m->value, x->head != NULL);
            pretty_close(o, '}');
        } else {
            pretty_tree(o, &m->value);
        }
    }
    if (!nested && x->head) pretty_raw(o, "mtp_num_hidden_layers", "1");
}

static edit make_edit(const plan *head, arena *mem, bool warn) {
    edit x = { .head = head, .warn = warn };
    if (head) x.add = configs_head_excludes(head, mem, &x.n_add);
    return x;
}

bool requant_config_text(buf *out, const requant *r, const plan *head, err *e) {
    const json *c = r->dst.config, *q = json_get(c, "quantization_config");
    if (q && !check_section(q, r->dst.dir, "config.json", e)) return false;
    arena mem = { 0 };
    const edit x = make_edit(head, &mem, q != NULL);
    pretty o = { .first = true };
    pretty_open(&o, '{');
    config_members(&o, c, &x);
    pretty_close(&o, '}');
    buf_byte(&o.b, '\n');
    arena_free(&mem);
    *out = o.b;
    return true;
}

/* What this run knows better than the export's own record; the rest of that record stays. */
static void provenance_members(pretty *o, const json *old, const plan *head, const provenance *from) {
    static const char *const ours[] = { "mtp", "mtp_scales", "mtp_calibration", "mtp_arithmetic", "mtp_algorithm" };
    for (uint32_t i = 0; json_is(old, JSON_OBJECT) && i < old->n; i++) {
        const json_member *m = &old->u.members[i];
        bool replaced = false;
        for (size_t k = 0; k < ARRAY_LEN(ours); k++) replaced |= str_is(m->key, ours[k]);
        if (!replaced) pretty_key(o, m->key), pretty_tree(o, &m->value);
    }
    pretty_text(o, "mtp", str_of(!head ? "none" : head->recipe.mtp == MTP_NVFP4 ? "nvfp4" : "bf16"));
    pretty_text(o, "mtp_scales", str_of(from->mtp_scales));
    if (!head || head->recipe.mtp != MTP_NVFP4) return;
    pretty_text(o, "mtp_calibration", str_of(from->calibration));
    pretty_text(o, "mtp_arithmetic", str_of(from->arith));
    pretty_text(o, "mtp_algorithm", str_of(from->algorithm));
}

bool requant_hf_quant_text(buf *out, const requant *r, const plan *head, const provenance *from, err *e) {
    const json *h = r->dst.hf_quant, *q = json_get(h, "quantization");
    if (!check_section(q, r->dst.dir, "hf_quant_config.json", e)) return false;
    arena mem = { 0 };
    const edit x = make_edit(head, &mem, json_get(r->dst.config, "quantization_config") == NULL);
    pretty o = { .first = true };
    pretty_open(&o, '{');
    for (uint32_t i = 0; i < h->n; i++) {
        const json_member *m = &h->u.members[i];
        if (str_is(m->key, "nibble")) continue; /* last, below */
        pretty_key(&o, m->key);
        if (!str_is(m->key, "quantization")) {
            pretty_tree(&o, &m->value);
            continue;
        }
        pretty_open(&o, '{');
        section(&o, q, "exclude_modules", &x);
        pretty_close(&o, '}');
    }
    pretty_key(&o, STR("nibble"));
    pretty_open(&o, '{');
    provenance_members(&o, json_get(h, "nibble"), head, from);
    pretty_close(&o, '}');
    pretty_close(&o, '}');
    buf_byte(&o.b, '\n');
    arena_free(&mem);
    *out = o.b;
    return true;
}
