/* tokenizer.json and tokenizer_config.json to a tokenizer: every setting applied, refused or reported. */
#include <stdlib.h>

#include "base/file.h"
#include "base/log.h"
#include "text/tokenizer_internal.h"
#include "text/unicode.h"

enum { FILE_MAX = 512 << 20, NESTED_MAX = 8 };

static bool unsupported(err *e, const char *what, const json *type) {
    if (!json_is(type, JSON_STRING)) return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: %s has no type", what);
    return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: %s \"" STR_FMT "\" is not supported", what,
                STR_ARG(json_str(type)));
}

static bool is_type(const json *v, const char *name) {
    const json *type = json_get(v, "type");
    return json_is(type, JSON_STRING) && str_is(json_str(type), name);
}

static bool is_null(const json *v) { return !v || v->type == JSON_NULL; }

/* ---- normalizer, post_processor, decoder ---- */

static bool load_normalizer(tokenizer *t, const json *v, int depth, err *e) {
    if (is_null(v)) return true;
    if (is_type(v, "NFC")) return t->nfc = true;
    const json *list = json_get(v, "normalizers");
    if (!is_type(v, "Sequence") || !json_is(list, JSON_ARRAY) || depth == NESTED_MAX)
        return unsupported(e, "normalizer", json_get(v, "type"));
    for (uint32_t i = 0; i < list->n; i++)
        if (!load_normalizer(t, &list->u.items[i], depth + 1, e)) return false;
    return true;
}

/* Only what adds no tokens: ids of a text are those of its pieces. */
static bool check_post_processor(const json *v, int depth, err *e) {
    if (is_null(v) || is_type(v, "ByteLevel")) return true;
    const json *single = json_get(v, "single"), *list = json_get(v, "processors");
    if (is_type(v, "TemplateProcessing") && json_is(single, JSON_ARRAY)) {
        for (uint32_t i = 0; i < single->n; i++)
            if (!json_get(&single->u.items[i], "Sequence") || single->n != 1)
                return fail(e, ERR_INPUT, "E-TOK-MODEL",
                            "tokenizer.json: post_processor TemplateProcessing adds tokens, which is not supported");
        return true;
    }
    if (!is_type(v, "Sequence") || !json_is(list, JSON_ARRAY) || depth == NESTED_MAX)
        return unsupported(e, "post_processor", json_get(v, "type"));
    for (uint32_t i = 0; i < list->n; i++)
        if (!check_post_processor(&list->u.items[i], depth + 1, e)) return false;
    return true;
}

static bool check_decoder(const json *v, err *e) {
    const json *list = json_get(v, "decoders");
    if (is_type(v, "Sequence") && json_is(list, JSON_ARRAY) && list->n == 1) v = &list->u.items[0];
    if (is_type(v, "ByteLevel")) return true;
    if (is_null(v))
        return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: decoder is missing (byte-level BPE needs ByteLevel)");
    return unsupported(e, "decoder", json_get(v, "type"));
}

/* ---- added tokens ---- */

static bool bad_added(err *e, str content, const char *what) {
    return fail(e, ERR_INPUT, "E-TOK-ADDED", "added token \"" STR_FMT "\": %s", STR_ARG(content), what);
}

static bool read_flag(const json *v, const char *key, bool absent, bool *out) {
    const json *f = json_get(v, key);
    *out = f ? f->type == JSON_TRUE : absent;
    return !f || json_is_bool(f);
}

static bool read_flags(added_token *a, const json *v, err *e) {
    if (read_flag(v, "special", false, &a->special) && read_flag(v, "single_word", false, &a->single_word) &&
        read_flag(v, "lstrip", false, &a->lstrip) && read_flag(v, "rstrip", false, &a->rstrip) &&
        read_flag(v, "normalized", !a->special, &a->normalized))
        return true;
    return bad_added(e, a->content, "a flag is neither true nor false");
}

static str added_key(const void *ctx, uint32_t index) { return ((const tokenizer *)ctx)->added[index].content; }

/* The id that HF gives: the vocabulary's when the content is in it, else the next free one. */
static int32_t expected_id(const tokenizer *t, str content, int32_t highest) {
    buf raw = { 0 };
    const bool plain = bpe_from_alphabet(&raw, content);
    const int32_t id = bpe_find(&t->model, plain ? buf_view(&raw) : content, plain ? TOKEN_PLAIN : TOKEN_ODD);
    buf_free(&raw);
    if (id >= 0) return id;
    return highest >= t->model.count ? highest + 1 : t->model.count;
}

/* What tokenizer.json and tokenizer_config.json together add. */
typedef struct loader {
    tokenizer *t;
    int32_t highest; /* id of the added tokens so far, -1 */
    err *e;
} loader;

/* Enter a token whose content is new. */
static bool add_token(loader *l, added_token a, int64_t id) {
    tokenizer *t = l->t;
    const int32_t expected = expected_id(t, a.content, l->highest);
    if (id != expected)
        return fail(l->e, ERR_INPUT, "E-TOK-ADDED", "added token \"" STR_FMT "\" has id %lld where %d follows",
                    STR_ARG(a.content), (long long)id, expected);
    if (expected < t->model.n_ids && t->model.token[expected].kind != TOKEN_ABSENT &&
        !str_eq(bpe_bytes(&t->model, expected), a.bytes))
        return bad_added(l->e, a.content, "its id belongs to another token");
    a.id = expected;
    l->highest = a.id > l->highest ? a.id : l->highest;
    t->added[t->n_added++] = a;
    return true;
}

/* An entry of either file. update: a known token takes the flags given here (what was special stays so). */
static bool load_token(loader *l, const json *v, int64_t id, bool update) {
    tokenizer *t = l->t;
    const json *content = json_get(v, "content");
    if (!json_is(content, JSON_STRING)) return fail(l->e, ERR_INPUT, "E-TOK-ADDED", "an added token has no content");
    added_token a = { .content = json_str(content) };
    if (a.content.n == 0) return bad_added(l->e, a.content, "it is empty");
    if (a.content.n > ADDED_CONTENT_MAX) return bad_added(l->e, a.content, "it is too long");
    if (!read_flags(&a, v, l->e)) return false;
    a.content = arena_str(&t->mem, a.content);
    buf raw = { 0 };
    a.bytes = bpe_from_alphabet(&raw, a.content) ? arena_str(&t->mem, buf_view(&raw)) : a.content;
    buf_free(&raw);
    CHECK(a.content.p && a.bytes.p, "out of memory");
    t->added[t->n_added].content = a.content;
    const uint32_t at = strtab_put(&t->by_content, a.content, (uint32_t)t->n_added, added_key, t);
    if (at == (uint32_t)t->n_added) return add_token(l, a, id);
    if (!update) return bad_added(l->e, a.content, "it is there twice");
    added_token *old = &t->added[at];
    if (old->id != id)
        return fail(l->e, ERR_INPUT, "E-TOK-ADDED",
                    "added token \"" STR_FMT "\" has id %d in tokenizer.json and %lld in tokenizer_config.json",
                    STR_ARG(a.content), old->id, (long long)id);
    a.id = old->id;
    a.special |= old->special;
    *old = a;
    return true;
}

/* added_tokens of tokenizer.json. */
static bool load_added(loader *l, const json *list) {
    for (uint32_t i = 0; list && i < list->n; i++) {
        const json *id = json_get(&list->u.items[i], "id");
        if (!json_is(id, JSON_INT))
            return fail(l->e, ERR_INPUT, "E-TOK-ADDED", "tokenizer.json: added token %u has no id", i);
        if (!load_token(l, &list->u.items[i], id->u.i, false)) return false;
    }
    return true;
}

typedef struct numbered {
    int64_t id;
    const json *v;
} numbered;

static int by_id(const void *a, const void *b) {
    const numbered *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* added_tokens_decoder of tokenizer_config.json: {"id": token}, applied in order of ids as transformers does. */
static bool load_decoder_table(loader *l, const json *table) {
    if (!table) return true;
    numbered *list = xmalloc((table->n + 1) * sizeof *list);
    bool ok = true;
    for (uint32_t i = 0; ok && i < table->n; i++) {
        const str key = table->u.members[i].key;
        int64_t id = 0;
        ok = key.n > 0 && key.n < 10;
        for (size_t k = 0; ok && k < key.n; k++) {
            ok = key.p[k] >= '0' && key.p[k] <= '9';
            id = id * 10 + key.p[k] - '0';
        }
        list[i] = (numbered){ id, &table->u.members[i].value };
        if (!ok) bad_added(l->e, key, "the key in added_tokens_decoder is no id");
    }
    if (ok && table->n) qsort(list, table->n, sizeof *list, by_id);
    for (uint32_t i = 0; ok && i < table->n; i++) ok = load_token(l, list[i].v, list[i].id, true);
    free(list);
    return ok;
}

/* Room for all entries of both files. */
static bool reserve_added(tokenizer *t, const json *list, const json *table, err *e) {
    if (list && list->type != JSON_ARRAY)
        return fail(e, ERR_INPUT, "E-TOK-ADDED", "tokenizer.json: added_tokens is no list");
    if (table && table->type != JSON_OBJECT)
        return fail(e, ERR_INPUT, "E-TOK-ADDED", "tokenizer_config.json: added_tokens_decoder is no object");
    const size_t n = (list ? list->n : 0) + (size_t)(table ? table->n : 0);
    if (n > ADDED_TOKENS_MAX)
        return fail(e, ERR_INPUT, "E-TOK-ADDED", "tokenizer.json: %zu added tokens are too many", n);
    t->added = xcalloc(n + 1, sizeof *t->added); /* and one to look a content up */
    if (!strtab_init(&t->by_content, n + 1))
        return fail(e, ERR_MACHINE, "E-TEXT-MEMORY", "no memory for %zu added tokens", n);
    return true;
}

/* Index the added tokens by id and put them into the tries: special ones first, each kind in the order of the file. */
static void index_added(tokenizer *t) {
    buf nfc = { 0 };
    t->vocab = t->model.n_ids;
    for (int i = 0; i < t->n_added; i++)
        if (t->added[i].id >= t->vocab) t->vocab = t->added[i].id + 1;
    t->added_at = xcalloc((size_t)t->vocab, sizeof *t->added_at);
    for (int i = 0; i < t->n_added; i++) t->added_at[t->added[i].id] = i + 1;
    for (int k = 0; k < 2 * t->n_added; k++) {
        const int i = k % t->n_added;
        const added_token *a = &t->added[i];
        if (a->special != (k < t->n_added)) continue;
        buf_clear(&nfc);
        const bool changed = a->normalized && t->nfc && unicode_nfc_append(&nfc, a->content);
        trie_add(a->normalized ? &t->normalized : &t->raw, changed ? buf_view(&nfc) : a->content, i);
    }
    buf_free(&nfc);
}

/* ---- tokenizer_config.json ---- */

static const json *get_object(const json *v, const char *key) {
    const json *f = json_get(v, key);
    return is_null(f) ? NULL : f;
}

/* The content of a token given as text or as an object. */
static bool token_text(const json *v, str *out) {
    const json *content = json_is(v, JSON_OBJECT) ? json_get(v, "content") : v;
    if (!json_is(content, JSON_STRING)) return false;
    return *out = json_str(content), true;
}

static bool load_bos(tokenizer *t, const json *config, err *e) {
    str bos;
    if (!json_is(json_get(config, "add_bos_token"), JSON_TRUE) || !token_text(get_object(config, "bos_token"), &bos))
        return true;
    t->bos = tokenizer_find(t, bos);
    if (t->bos >= 0) return true;
    return fail(e, ERR_INPUT, "E-TOK-ADDED", "tokenizer_config.json: bos_token \"" STR_FMT "\" is no token",
                STR_ARG(bos));
}

static void report_ignored(const json *file, const json *config) {
    static const char *const in_file[] = { "truncation", "padding" };
    static const char *const in_config[] = { "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces",
                                             "split_special_tokens" };
    for (size_t i = 0; i < ARRAY_LEN(in_file); i++)
        if (!is_null(json_get(file, in_file[i]))) log_say("W-TOK-IGNORED", "tokenizer.json: %s is ignored", in_file[i]);
    for (size_t i = 0; i < ARRAY_LEN(in_config); i++)
        if (json_is(json_get(config, in_config[i]), JSON_TRUE))
            log_say("W-TOK-IGNORED", "tokenizer_config.json: %s is ignored", in_config[i]);
}

/* ---- everything ---- */

static bool load(tokenizer *t, const json *file, const json *config, err *e) {
    const json *list = get_object(file, "added_tokens"), *table = get_object(config, "added_tokens_decoder");
    loader l = { .t = t, .highest = -1, .e = e };
    if (!json_is(file, JSON_OBJECT) || !json_is(json_get(file, "model"), JSON_OBJECT))
        return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer.json: no object with a model");
    if (config && config->type != JSON_OBJECT)
        return fail(e, ERR_INPUT, "E-TOK-MODEL", "tokenizer_config.json: no object");
    if (!load_normalizer(t, json_get(file, "normalizer"), 0, e) ||
        !pretok_open(&t->pre, json_get(file, "pre_tokenizer"), e) ||
        !check_post_processor(json_get(file, "post_processor"), 0, e) || !check_decoder(json_get(file, "decoder"), e) ||
        !bpe_build(&t->model, json_get(file, "model"), e))
        return false;
    if (!reserve_added(t, list, table, e) || !load_added(&l, list) || !load_decoder_table(&l, table)) return false;
    index_added(t);
    report_ignored(file, config);
    return load_bos(t, config, e);
}

bool tokenizer_open(tokenizer **out, const char *dir, err *e) {
    /* Duplicate keys: those of the vocabulary are found while it is built, in half the time. */
    const json_limits limits = { .max_bytes = FILE_MAX, .allow_duplicates = true };
    char *path = path_join(dir, "tokenizer.json"), *config_path = path_join(dir, "tokenizer_config.json");
    const json *file = NULL, *config = NULL;
    arena mem = { 0 };
    tokenizer *t = xcalloc(1, sizeof *t);
    t->bos = -1;
    trie_init(&t->raw);
    trie_init(&t->normalized);
    const bool ok = json_parse_file(&file, &mem, path, &limits, e) &&
                    (!file_exists(config_path) || json_parse_file(&config, &mem, config_path, NULL, e)) &&
                    load(t, file, config, e);
    arena_free(&mem);
    free(path);
    free(config_path);
    if (ok) return *out = t, true;
    tokenizer_close(t);
    return false;
}
