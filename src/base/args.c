#include "base/args.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HELP_COLUMNS = 100, HELP_INDENT = 30 };

/* ---- values ---- */

bool args_int(int64_t *out, const char *text) {
    const char *digits = text + (*text == '-' || *text == '+');
    if (*digits < '0' || *digits > '9') return false;
    char *end;
    errno = 0;
    const long long v = strtoll(text, &end, 10);
    if (errno || *end) return false;
    *out = v;
    return true;
}

bool args_double(double *out, const char *text) {
    if (!*text || strchr(" \t\n\v\f\r", *text)) return false;
    char *end;
    const double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v)) return false;
    *out = v;
    return true;
}

bool args_bytes(int64_t *out, const char *text) {
    if (*text < '0' || *text > '9') return false;
    char *end;
    const double v = strtod(text, &end);
    const char *units = "KMGTP", *u = *end ? strchr(units, *end & ~0x20) : NULL;
    double unit = 1;
    if (u) {
        for (int i = 0; i <= u - units; i++) unit *= 1024;
        end++;
        if (*end == 'i') end++;
    }
    if (*end == 'B' || *end == 'b') end++;
    if (*end || !(v * unit < 9.2e18)) return false;
    *out = (int64_t)(v * unit);
    return true;
}

void arg_strings_add(arg_strings *s, const char *text) {
    s->v = xrealloc(s->v, (size_t)(s->n + 1) * sizeof *s->v);
    s->v[s->n++] = text;
}

void arg_strings_free(arg_strings *s) {
    free(s->v);
    *s = (arg_strings){ 0 };
}

/* ---- suggestions ---- */

/* Optimal string alignment distance: insert, delete, replace, swap of neighbours. */
static int distance(const char *a, const char *b) {
    enum { MAX = 48 };
    const int n = (int)strlen(a), m = (int)strlen(b);
    if (n >= MAX || m >= MAX) return MAX;
    int d[MAX][MAX];
    for (int i = 0; i <= n; i++) d[i][0] = i;
    for (int j = 0; j <= m; j++) d[0][j] = j;
    for (int i = 1; i <= n; i++)
        for (int j = 1; j <= m; j++) {
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best) best = d[i - 1][j] + 1;
            if (d[i][j - 1] + 1 < best) best = d[i][j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && d[i - 2][j - 2] + 1 < best)
                best = d[i - 2][j - 2] + 1;
            d[i][j] = best;
        }
    return d[n][m];
}

const char *args_nearest(const char *word, const char *const *candidates, int count) {
    const int n = (int)strlen(word);
    for (int i = 0; i < count && n >= 3; i++) /* an abbreviation */
        if (candidates[i] && strncmp(candidates[i], word, (size_t)n) == 0) return candidates[i];
    int best = n < 5 ? 2 : 3; /* exclusive: one error in short words, two in longer ones */
    const char *found = NULL;
    for (int i = 0; i < count; i++)
        if (candidates[i]) {
            const int d = distance(word, candidates[i]);
            if (d < best) best = d, found = candidates[i];
        }
    return found;
}

/* ---- table ---- */

static int table_count(const arg_spec *s) { return s->count + (s->common ? s->common_count : 0); }
static const arg_opt *table_at(const arg_spec *s, int i) {
    return i < s->count ? &s->opts[i] : &s->common[i - s->count];
}

static const arg_opt *find_long(const arg_spec *s, const char *name, size_t n) {
    for (int i = 0; i < table_count(s); i++) {
        const arg_opt *o = table_at(s, i);
        if (o->type != ARG_GROUP && strlen(o->name) == n && memcmp(o->name, name, n) == 0) return o;
    }
    return NULL;
}

static const arg_opt *find_key(const arg_spec *s, char key) {
    for (int i = 0; i < table_count(s); i++)
        if (table_at(s, i)->type != ARG_GROUP && table_at(s, i)->key == key) return table_at(s, i);
    return NULL;
}

static bool takes_value(const arg_opt *o) { return o->type >= ARG_INT; }

static bool unknown_option(const arg_spec *s, const char *name, size_t n, err *e) {
    const int count = table_count(s);
    const char **names = xcalloc((size_t)count + 1, sizeof *names);
    char word[64];
    const size_t m = n < sizeof word - 1 ? n : sizeof word - 1;
    memcpy(word, name, m);
    word[m] = 0;
    for (int i = 0; i < count; i++)
        if (table_at(s, i)->type != ARG_GROUP && !table_at(s, i)->hidden) names[i] = table_at(s, i)->name;
    names[count] = "help";
    const char *near = args_nearest(word, names, count + 1);
    if (near)
        fail(e, ERR_USAGE, "E-USAGE", "--%s: unknown option (did you mean --%s?)", word, near);
    else
        fail(e, ERR_USAGE, "E-USAGE", "--%s: unknown option (--help lists all)", word);
    free(names);
    return false;
}

static bool bad_value(const arg_opt *o, const char *v, const char *what, err *e) {
    return fail(e, ERR_USAGE, "E-USAGE", "--%s: '%.80s' is %s", o->name, v, what);
}

static bool store_int(const arg_opt *o, int64_t v, const char *text, err *e) {
    int64_t lo = o->lo, hi = o->hi;
    if (lo == 0 && hi == 0) lo = o->type == ARG_BYTES ? 0 : INT64_MIN, hi = INT64_MAX;
    if (o->type == ARG_INT) lo = max_i64(lo, INT32_MIN), hi = min_i64(hi, INT32_MAX);
    if (v < lo || v > hi)
        return fail(e, ERR_USAGE, "E-USAGE", "--%s: %.80s is out of range (%lld to %lld)", o->name, text, (long long)lo,
                    (long long)hi);
    if (o->type == ARG_INT)
        *(int *)o->dst = (int)v;
    else
        *(int64_t *)o->dst = v;
    return true;
}

static bool store_enum(const arg_opt *o, const char *v, err *e) {
    buf list = { 0 };
    int n = 0;
    for (; o->choices[n]; n++) {
        if (strcmp(o->choices[n], v) == 0) return buf_free(&list), *(int *)o->dst = n, true;
        buf_printf(&list, "%s%s", n ? ", " : "", o->choices[n]);
    }
    const char *near = args_nearest(v, o->choices, n);
    if (near)
        fail(e, ERR_USAGE, "E-USAGE", "--%s: unknown value '%.80s' (did you mean %s? one of %s)", o->name, v, near,
             list.p);
    else
        fail(e, ERR_USAGE, "E-USAGE", "--%s: unknown value '%.80s' (one of %s)", o->name, v, list.p);
    buf_free(&list);
    return false;
}

static bool store_double(const arg_opt *o, const char *v, err *e) {
    double d;
    if (!args_double(&d, v)) return bad_value(o, v, "no number", e);
    if ((o->flo != 0 || o->fhi != 0) && !(d >= o->flo && d <= o->fhi))
        return fail(e, ERR_USAGE, "E-USAGE", "--%s: %.80s is out of range (%g to %g)", o->name, v, o->flo, o->fhi);
    *(double *)o->dst = d;
    return true;
}

static bool store(const arg_opt *o, const char *v, err *e) {
    int64_t n;
    if (o->given) *o->given = true;
    switch (o->type) {
    case ARG_GROUP: break;
    case ARG_FLAG: *(bool *)o->dst = true; break;
    case ARG_SET: *(int *)o->dst = o->value; break;
    case ARG_COUNT: ++*(int *)o->dst; break;
    case ARG_INT:
    case ARG_INT64: return args_int(&n, v) ? store_int(o, n, v, e) : bad_value(o, v, "no whole number", e);
    case ARG_BYTES:
        return args_bytes(&n, v) ? store_int(o, n, v, e) : bad_value(o, v, "no size (such as 512M or 4G)", e);
    case ARG_DOUBLE: return store_double(o, v, e);
    case ARG_STR: *(const char **)o->dst = v; break;
    case ARG_LIST: arg_strings_add(o->dst, v); break;
    case ARG_ENUM: return store_enum(o, v, e);
    }
    return true;
}

/* ---- the walk ---- */

typedef struct walk {
    const arg_spec *spec;
    int argc, at;
    char *const *argv;
    arg_strings *pos;
    int positionals;
    bool apply; /* false: only look for --help */
    bool help;
} walk;

static bool next_value(walk *w, const arg_opt *o, const char **value, err *e) {
    const char *v = w->at + 1 < w->argc ? w->argv[w->at + 1] : NULL;
    const bool forgotten =
        v && v[0] == '-' && v[1] == '-' && (v[2] == 0 || find_long(w->spec, v + 2, strcspn(v + 2, "=")));
    if (!v || forgotten)
        return fail(e, ERR_USAGE, "E-USAGE", "--%s: needs a value%s%s", o->name, forgotten ? ", found " : "",
                    forgotten ? v : "");
    w->at++;
    *value = v;
    return true;
}

static bool walk_long(walk *w, const char *arg, err *e) {
    const size_t n = strcspn(arg, "=");
    const arg_opt *o = find_long(w->spec, arg, n);
    if (!o && n == 4 && memcmp(arg, "help", 4) == 0) return w->help = true;
    if (!o) return unknown_option(w->spec, arg, n, e);
    const char *value = NULL;
    if (!takes_value(o)) {
        if (arg[n]) return fail(e, ERR_USAGE, "E-USAGE", "--%s: takes no value", o->name);
    } else if (arg[n]) {
        value = arg + n + 1;
    } else if (!next_value(w, o, &value, e)) {
        return false;
    }
    return w->apply ? store(o, value, e) : true;
}

static bool walk_short(walk *w, const char *arg, err *e) {
    for (; *arg; arg++) {
        const arg_opt *o = find_key(w->spec, *arg);
        if (!o && *arg == 'h') return w->help = true;
        if (!o) return fail(e, ERR_USAGE, "E-USAGE", "-%c: unknown option (--help lists all)", *arg);
        const char *value = NULL;
        if (takes_value(o)) {
            if (arg[1])
                value = arg + 1 + (arg[1] == '=');
            else if (!next_value(w, o, &value, e))
                return false;
        }
        if (w->apply && !store(o, value, e)) return false;
        if (value) return true;
    }
    return true;
}

static bool walk_positional(walk *w, const char *arg, err *e) {
    const int max = w->spec->max_positional;
    if (max >= 0 && w->positionals >= max)
        return fail(e, ERR_USAGE, "E-USAGE", "'%.200s': one argument too many (usage: nibble %s)", arg, w->spec->usage);
    w->positionals++;
    if (w->apply && w->pos) arg_strings_add(w->pos, arg);
    return true;
}

static bool walk_all(walk *w, err *e) {
    bool options = true;
    for (w->at = 1; w->at < w->argc && !w->help; w->at++) {
        const char *arg = w->argv[w->at];
        bool ok;
        if (!options || arg[0] != '-' || arg[1] == 0)
            ok = walk_positional(w, arg, e);
        else if (strcmp(arg, "--") == 0)
            ok = true, options = false;
        else
            ok = arg[1] == '-' ? walk_long(w, arg + 2, e) : walk_short(w, arg + 1, e);
        if (!ok) return false;
    }
    if (!w->help && w->positionals < w->spec->min_positional)
        return fail(e, ERR_USAGE, "E-USAGE", "an argument is missing (usage: nibble %s)", w->spec->usage);
    return true;
}

bool args_parse(const arg_spec *spec, int argc, char *const *argv, arg_strings *pos, bool *help, err *e) {
    walk look = { .spec = spec, .argc = argc, .argv = argv };
    if (!walk_all(&look, e)) return false;
    *help = look.help;
    if (look.help) return true;
    walk w = { .spec = spec, .argc = argc, .argv = argv, .pos = pos, .apply = true };
    return walk_all(&w, e);
}

/* ---- help ---- */

/* Words of text from column `col` on, continued at `indent`. */
static void wrap(buf *out, const char *text, int col, int indent) {
    bool first = true;
    while (*text) {
        const int n = (int)strcspn(text, " ");
        if (!first && col + 1 + n > HELP_COLUMNS) {
            buf_printf(out, "\n%*s", indent, "");
            col = indent, first = true;
        }
        buf_printf(out, "%s%.*s", first ? "" : " ", n, text);
        col += n + !first;
        first = false;
        text += n;
        while (*text == ' ') text++;
    }
    buf_byte(out, '\n');
}

static const char *meta_of(const arg_opt *o) {
    if (o->meta) return o->meta;
    switch (o->type) {
    case ARG_INT:
    case ARG_INT64: return "N";
    case ARG_BYTES: return "SIZE";
    case ARG_DOUBLE: return "X";
    default: return "TEXT";
    }
}

static void help_default(buf *b, const arg_opt *o) {
    if (o->none) {
        if (*o->none) buf_printf(b, " (default: %s)", o->none);
        return;
    }
    switch (o->type) {
    case ARG_INT: buf_printf(b, " (default: %d)", *(int *)o->dst); break;
    case ARG_INT64:
    case ARG_BYTES: buf_printf(b, " (default: %lld)", (long long)*(int64_t *)o->dst); break;
    case ARG_DOUBLE: buf_printf(b, " (default: %g)", *(double *)o->dst); break;
    case ARG_STR:
        if (*(const char **)o->dst) buf_printf(b, " (default: %s)", *(const char **)o->dst);
        break;
    case ARG_ENUM: {
        const int at = *(int *)o->dst;
        int n = 0;
        while (o->choices[n]) n++;
        if (at >= 0 && at < n) buf_printf(b, " (default: %s)", o->choices[at]);
        break;
    }
    default: break;
    }
}

static void help_option(buf *out, const arg_opt *o) {
    buf left = { 0 }, right = { 0 };
    if (o->key)
        buf_printf(&left, "  -%c, --%s", o->key, o->name);
    else
        buf_printf(&left, "      --%s", o->name);
    if (o->type == ARG_ENUM && !o->meta) {
        for (int i = 0; o->choices[i]; i++) buf_printf(&left, "%c%s", i ? '|' : ' ', o->choices[i]);
    } else if (takes_value(o)) {
        buf_printf(&left, " %s", meta_of(o));
    }
    buf_puts(&right, o->help ? o->help : "");
    if (o->type == ARG_LIST) buf_puts(&right, " (may be repeated)");
    help_default(&right, o);
    buf_str(out, buf_view(&left));
    if ((int)left.n > HELP_INDENT - 2)
        buf_printf(out, "\n%*s", HELP_INDENT, "");
    else
        buf_printf(out, "%*s", HELP_INDENT - (int)left.n, "");
    wrap(out, right.p ? right.p : "", HELP_INDENT, HELP_INDENT);
    buf_free(&left);
    buf_free(&right);
}

void args_help(buf *out, const arg_spec *spec) {
    buf_printf(out, "usage: nibble %s\n", spec->usage);
    if (spec->about) {
        buf_byte(out, '\n');
        wrap(out, spec->about, 0, 0);
    }
    bool headed = false;
    for (int i = 0; i < table_count(spec); i++) {
        const arg_opt *o = table_at(spec, i);
        if (o->type == ARG_GROUP) {
            buf_printf(out, "\n%s\n", o->help);
            headed = true;
        } else if (!o->hidden) {
            if (!headed) buf_puts(out, "\nOptions\n");
            headed = true;
            help_option(out, o);
        }
    }
    if (!find_long(spec, "help", 4))
        help_option(
            out,
            &(arg_opt){ .type = ARG_FLAG, .name = "help", .key = find_key(spec, 'h') ? 0 : 'h', .help = "this text" });
    if (spec->examples)
        buf_printf(out, "\nExamples\n%s%s", spec->examples, str_ends(str_of(spec->examples), STR("\n")) ? "" : "\n");
}
