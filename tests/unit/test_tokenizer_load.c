/* tokenizer.json and tokenizer_config.json: each setting is honoured, refused by name, or reported; hostile files. */
#include "base/log.h"
#include "lib/scratch.h"
#include "lib/toytok.h"
#include "text/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>

static tokenizer *opened(const toytok *s) {
    tokenizer *t = NULL;
    err e = { 0 };
    if (!toytok_open(&t, s, &e)) fail_msg("%s: %s", e.id, e.msg);
    return t;
}

static void gives(const toytok *s, const char *text, const char *want) {
    tokenizer *t = opened(s);
    assert_string_equal(toytok_ids(t, str_of(text), NULL), want);
    tokenizer_close(t);
}

/* The error's id, and a word of its message. */
static void refused(const toytok *s, const char *id, const char *word) {
    tokenizer *t = NULL;
    err e = { 0 };
    if (toytok_open(&t, s, &e)) fail_msg("accepted, but %s (%s) was expected", id, word);
    if (strcmp(e.id, id) != 0 || !strstr(e.msg, word))
        fail_msg("%s: %s, but %s (%s) was expected", e.id, e.msg, id, word);
    assert_int_equal(e.kind, ERR_INPUT);
}

/* ---- settings ---- */

static void normalizers(void **state) {
    (void)state;
    const char *text = "e\xCC\x81"; /* e + combining acute */
    gives(&(toytok){ .normalizer = "null" }, text, "68 136 223");
    gives(&(toytok){ 0 }, text, "127 102");
    gives(&(toytok){ .normalizer = "{\"type\": \"Sequence\", \"normalizers\": []}" }, text, "68 136 223");
    gives(&(toytok){ .normalizer = "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"NFC\"}]}" }, text,
          "127 102");
    refused(&(toytok){ .normalizer = "{\"type\": \"NFKC\"}" }, "E-TOK-MODEL", "NFKC");
    refused(&(toytok){ .normalizer = "{\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"Lowercase\"}]}" },
            "E-TOK-MODEL", "Lowercase");
    refused(&(toytok){ .normalizer = "{}" }, "E-TOK-MODEL", "no type");
    refused(&(toytok){ .normalizer = "[]" }, "E-TOK-MODEL", "no type");
}

#define BYTES(prefix, regex) \
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": " prefix ", \"use_regex\": " regex ", \"trim_offsets\": true}"
#define SPLIT(pattern, behavior, invert)                                                        \
    "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {" pattern \
    "}, \"behavior\": \"" behavior "\", \"invert\": " invert "}, " BYTES("false", "false") "]}"

static void pre_tokenizers(void **state) {
    (void)state;
    const toytok ab = { .vocab_more = ", \"\xC4\xA0"
                                      "a\": 256, \"ab\": 257",
                        .merges = "[[\"\xC4\xA0\", \"a\"], [\"a\", \"b\"]]" };
    toytok s = ab;
    s.pre = BYTES("true", "true");
    gives(&s, "ab", "256 65");
    gives(&s, " ab", "256 65");
    gives(&s, "", "");
    s.pre = BYTES("false", "false");
    gives(&s, "ab", "257");
    refused(&(toytok){ .pre = "null" }, "E-TOK-MODEL", "pre_tokenizer");
    refused(&(toytok){ .pre = "{\"type\": \"Metaspace\"}" }, "E-TOK-MODEL", "Metaspace");
    refused(&(toytok){ .pre = "{\"type\": \"ByteLevel\", \"use_regex\": 1}" }, "E-TOK-MODEL", "use_regex");
    refused(&(toytok){ .pre = "{\"type\": \"Sequence\", \"pretokenizers\": []}" }, "E-TOK-MODEL", "ByteLevel");
    refused(&(toytok){ .pre = "{\"type\": \"Sequence\"}" }, "E-TOK-MODEL", "pretokenizers");
    refused(&(toytok){ .pre = "{\"type\": \"Sequence\", \"pretokenizers\": [" BYTES("false", "false") ", " BYTES(
                           "false", "false") "]}" },
            "E-TOK-MODEL", "behind ByteLevel");
    refused(&(toytok){ .pre = SPLIT("\"Regex\": \"a\"", "Sideways", "false") }, "E-TOK-MODEL", "behavior");
    refused(&(toytok){ .pre = SPLIT("\"Glob\": \"a\"", "Isolated", "false") }, "E-TOK-MODEL", "Regex");
    refused(&(toytok){ .pre = SPLIT("\"Regex\": \"a*\"", "Removed", "false") }, "E-TOK-MODEL", "empty");
    refused(&(toytok){ .pre = SPLIT("\"Regex\": \"(a\"", "Isolated", "false") }, "E-TOK-PATTERN", "byte 2");
}

/* Pieces become visible through merges that a cut prevents: every pair of the letters merges. */
static void behaviors(void **state) {
    (void)state;
    static const struct {
        const char *pre, *pieces;
    } cases[] = {
        /* HF tokenizers 0.23 on "abbcdbeb" */
        { SPLIT("\"Regex\": \"[bd]\"", "Removed", "false"), "a|c|e" },
        { SPLIT("\"Regex\": \"[bd]\"", "Removed", "true"), "b|b|d|b|b" },
        { SPLIT("\"Regex\": \"[bd]\"", "Isolated", "false"), "a|b|b|c|d|b|e|b" },
        { SPLIT("\"Regex\": \"[bd]\"", "Isolated", "true"), "a|b|b|c|d|b|e|b" },
        { SPLIT("\"Regex\": \"[bd]\"", "MergedWithPrevious", "false"), "ab|b|cd|b|eb" },
        { SPLIT("\"Regex\": \"[bd]\"", "MergedWithPrevious", "true"), "a|b|bc|d|be|b" },
        { SPLIT("\"Regex\": \"[bd]\"", "MergedWithNext", "false"), "a|b|bc|d|be|b" },
        { SPLIT("\"Regex\": \"[bd]\"", "MergedWithNext", "true"), "ab|b|cd|b|eb" },
        { SPLIT("\"Regex\": \"[bd]\"", "Contiguous", "false"), "a|bb|c|db|e|b" },
        { SPLIT("\"Regex\": \"[bd]\"", "Contiguous", "true"), "a|bb|c|db|e|b" },
        { SPLIT("\"String\": \"b\"", "Removed", "false"), "a|cd|e" },
        { SPLIT("\"String\": \"bb\"", "Isolated", "false"), "a|bb|cdbeb" },
        { SPLIT("\"Regex\": \"(?=b)\"", "Isolated", "false"), "a|b|bcd|be|b" },
        { SPLIT("\"Regex\": \"x*\"", "Isolated", "false"), "a|b|b|c|d|b|e|b" },
    };
    /* Tokens for every substring, ignore_merges: a piece is one token, whose bytes are the piece. */
    static const char text[] = "abbcdbeb";
    buf vocab = { 0 };
    tokenizer *t;
    int next = 256;
    for (size_t n = 2; n <= 8; n++) {
        for (size_t i = 0; i + n <= 8; i++) {
            char entry[32], key[16];
            snprintf(key, sizeof key, "\"%.*s\":", (int)n, text + i);
            if (vocab.p && strstr(vocab.p, key)) continue;
            snprintf(entry, sizeof entry, ", %s %d", key, next++);
            buf_puts(&vocab, entry);
        }
    }
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        id_list a = { 0 };
        buf shown = { 0 };
        err e = { 0 };
        t = opened(&(toytok){ .pre = cases[i].pre, .vocab_more = vocab.p, .model_more = ", \"ignore_merges\": true" });
        assert_true(tokenizer_encode(t, &a, str_of(text), NULL, &e));
        for (size_t k = 0; k < a.n; k++) {
            if (k) buf_byte(&shown, '|');
            buf_str(&shown, tokenizer_bytes(t, a.v[k]));
        }
        assert_string_equal(shown.p, cases[i].pieces);
        buf_free(&shown);
        ids_free(&a);
        tokenizer_close(t);
    }
    buf_free(&vocab);
}

static void post_processors_and_decoders(void **state) {
    (void)state;
    static const char quiet[] =
        "{\"type\": \"TemplateProcessing\", \"single\": [{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}], "
        "\"pair\": [], \"special_tokens\": {}}";
    static const char bos[] =
        "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"<s>\", \"type_id\": 0}}, "
        "{\"Sequence\": {\"id\": \"A\", \"type_id\": 0}}], \"pair\": [], \"special_tokens\": {}}";
    gives(&(toytok){ .post = "{\"type\": \"ByteLevel\", \"trim_offsets\": false}" }, "a", "64");
    gives(&(toytok){ .post = quiet }, "a", "64");
    refused(&(toytok){ .post = bos }, "E-TOK-MODEL", "TemplateProcessing");
    refused(&(toytok){ .post = "{\"type\": \"BertProcessing\"}" }, "E-TOK-MODEL", "BertProcessing");
    gives(&(toytok){ .post = "{\"type\": \"Sequence\", \"processors\": [{\"type\": \"ByteLevel\"}]}" }, "a", "64");
    refused(&(toytok){ .decoder = "null" }, "E-TOK-MODEL", "decoder");
    refused(&(toytok){ .decoder = "{\"type\": \"Metaspace\"}" }, "E-TOK-MODEL", "Metaspace");
    gives(&(toytok){ .decoder = "{\"type\": \"Sequence\", \"decoders\": [{\"type\": \"ByteLevel\"}]}" }, "a", "64");
}

static void model_settings(void **state) {
    (void)state;
    const char *abc = ", \"ab\": 256, \"abc\": 257";
    gives(&(toytok){ .vocab_more = abc, .merges = "[[\"a\", \"b\"]]" }, "abc", "256 66");
    gives(&(toytok){ .vocab_more = abc, .merges = "[\"#version: 0.2\", \"a b\", \"ab c\"]" }, "abc", "257");
    gives(&(toytok){ .vocab_more = abc, .merges = "[\"a b\"]", .model_more = ", \"ignore_merges\": true" }, "abc abcd",
          "257 220 256 66 67");
    gives(&(toytok){ .model_more =
                         ", \"unk_token\": \"zzz\", \"byte_fallback\": true, \"fuse_unk\": true, \"dropout\": 0.0" },
          "a", "64");
    refused(&(toytok){ .model_more = ", \"dropout\": 0.1" }, "E-TOK-MODEL", "dropout");
    refused(&(toytok){ .model_more = ", \"continuing_subword_prefix\": \"##\"" }, "E-TOK-MODEL",
            "continuing_subword_prefix");
    refused(&(toytok){ .model_more = ", \"end_of_word_suffix\": \"</w>\"" }, "E-TOK-MODEL", "end_of_word_suffix");
    refused(&(toytok){ .model_more = ", \"ignore_merges\": \"yes\"" }, "E-TOK-MODEL", "ignore_merges");
    refused(&(toytok){ .model_more = ", \"type\": \"Unigram\"" }, "E-TOK-MODEL", "not BPE");
    refused(&(toytok){ .vocab = "{\"a\": 0}", .model_more = ", \"unk_token\": \"a\"" }, "E-TOK-MODEL", "unk_token");
}

/* A pair that is listed twice has its later rank, as in HF. */
static void repeated_merge(void **state) {
    (void)state;
    gives(&(toytok){ .vocab_more = ", \"ab\": 256, \"bc\": 257",
                     .merges = "[[\"a\",\"b\"],[\"b\",\"c\"],[\"a\",\"b\"]]" },
          "abc", "64 257");
}

/* ---- what is said ---- */

typedef struct said {
    char ids[256];
    int n;
} said;

static void listen(void *ctx, const char *id, const char *line) {
    said *s = ctx;
    (void)line;
    snprintf(s->ids + strlen(s->ids), sizeof s->ids - strlen(s->ids), "%s%s", s->n++ ? " " : "", id);
}

static void warnings(void **state) {
    (void)state;
    said s = { .n = 0 };
    log_set_sink(listen, &s);
    gives(&(toytok){ .top_more = ", \"truncation\": {\"max_length\": 5}, \"padding\": {}" }, "aaaaaaaa",
          "64 64 64 64 64 64 64 64");
    assert_string_equal(s.ids, "W-TOK-IGNORED W-TOK-IGNORED");
    s = (said){ .n = 0 };
    /* Bytes without a token vanish, as in HF; the pair around them still merges. */
    gives(&(toytok){ .vocab = "{\"a\": 0, \"b\": 1, \"ab\": 2}", .merges = "[[\"a\", \"b\"]]" }, "axb", "2");
    assert_string_equal(s.ids, "W-TOK-BYTES");
    s = (said){ .n = 0 };
    gives(&(toytok){ .config = "{\"add_eos_token\": true, \"clean_up_tokenization_spaces\": false}" }, "a", "64");
    assert_string_equal(s.ids, "W-TOK-IGNORED");
    s = (said){ .n = 0 };
    gives(&(toytok){ .config = "{\"add_bos_token\": false, \"model_max_length\": 10}" }, "a", "64");
    assert_string_equal(s.ids, "");
    log_set_sink(NULL, NULL);
}

/* ---- added tokens ---- */

#define TOKEN(id, content, more) "{\"id\": " #id ", \"content\": \"" content "\"" more "}"

static void added_tokens(void **state) {
    (void)state;
    gives(&(toytok){ .added = "[" TOKEN(256, "<x>", "") "]" }, "a<x>b", "64 256 65");
    gives(&(toytok){ .added = "[" TOKEN(256, "<x>", ", \"lstrip\": true") "]" }, "a  <x> b", "64 256 220 65");
    gives(&(toytok){ .added = "[" TOKEN(256, "<x>", ", \"rstrip\": true") "]" }, "a <x>  b", "64 220 256 65");
    gives(&(toytok){ .added = "[" TOKEN(256, "xy", ", \"single_word\": true") "]" }, "axy xy", "64 87 88 220 256");
    gives(&(toytok){ .added = "[" TOKEN(256, "<-", "") "," TOKEN(257, "<-<", "") "]" }, "<-<-<",
          "257 12 27"); /* the longest */
    gives(&(toytok){ .added = "[" TOKEN(64, "a", ", \"special\": true") "]" }, "ba",
          "65 64"); /* one of the vocabulary */
    /* normalized: matched in normalized text, by its normalized form. */
    gives(&(toytok){ .added = "[" TOKEN(256, "e\\u0301", ", \"normalized\": true") "]" }, "\xC3\xA9", "256");
    gives(&(toytok){ .added = "[" TOKEN(256, "e\\u0301", ", \"normalized\": false") "]" }, "\xC3\xA9 e\xCC\x81",
          "127 102 220 256");
    refused(&(toytok){ .added = "[" TOKEN(300, "<x>", "") "]" }, "E-TOK-ADDED", "256");
    refused(&(toytok){ .added = "[" TOKEN(256, "a", "") "]" }, "E-TOK-ADDED", "64");
    refused(&(toytok){ .added = "[" TOKEN(-1, "<x>", "") "]" }, "E-TOK-ADDED", "-1");
    refused(&(toytok){ .added = "[" TOKEN(1000000000, "<x>", "") "]" }, "E-TOK-ADDED", "1000000000");
    refused(&(toytok){ .added = "[" TOKEN(1e9, "<x>", "") "]" }, "E-TOK-ADDED", "no id");
    refused(&(toytok){ .added = "[" TOKEN(256, "", "") "]" }, "E-TOK-ADDED", "empty");
    refused(&(toytok){ .added = "[" TOKEN(256, "<x>", "") "," TOKEN(256, "<x>", "") "]" }, "E-TOK-ADDED", "twice");
    refused(&(toytok){ .added = "[" TOKEN(256, "<x>", "") "," TOKEN(256, "<y>", "") "]" }, "E-TOK-ADDED", "257");
    refused(&(toytok){ .added = "[" TOKEN(256, "<x>", ", \"lstrip\": 1") "]" }, "E-TOK-ADDED", "flag");
    refused(&(toytok){ .added = "[{\"id\": 256}]" }, "E-TOK-ADDED", "content");
    refused(&(toytok){ .added = "[7]" }, "E-TOK-ADDED", "no id");
    refused(&(toytok){ .added = "{}" }, "E-TOK-ADDED", "no list");
}

static void config_adds(void **state) {
    (void)state;
    const char *x = "[" TOKEN(256, "<x>", "") "]";
    tokenizer *t =
        opened(&(toytok){ .added = x,
                          .config = "{\"added_tokens_decoder\": {\"257\": {\"content\": \"<y>\", \"special\": true}, "
                                    "\"256\": {\"content\": \"<x>\", \"lstrip\": true}}}" });
    assert_string_equal(toytok_ids(t, STR("a <x> <y>"), NULL), "64 256 220 257");
    assert_true(tokenizer_is_special(t, 257) && !tokenizer_is_special(t, 256));
    assert_int_equal(tokenizer_vocab(t), 258);
    tokenizer_close(t);
    refused(&(toytok){ .added = x, .config = "{\"added_tokens_decoder\": {\"255\": {\"content\": \"<x>\"}}}" },
            "E-TOK-ADDED", "255");
    refused(&(toytok){ .added = x, .config = "{\"added_tokens_decoder\": {\"x\": {\"content\": \"<x>\"}}}" },
            "E-TOK-ADDED", "no id");
    refused(&(toytok){ .added = x, .config = "{\"added_tokens_decoder\": []}" }, "E-TOK-ADDED", "no object");
    refused(&(toytok){ .config = "[]" }, "E-TOK-MODEL", "tokenizer_config.json");
    const toytok with_bos = { .added = x,
                              .config = "{\"add_bos_token\": true, \"bos_token\": {\"content\": \"<x>\"}}" };
    gives(&with_bos, "a", "64");
    t = opened(&with_bos);
    assert_string_equal(toytok_ids(t, STR("a"), &(encode_options){ .bos = true }), "256 64");
    tokenizer_close(t);
    refused(&(toytok){ .config = "{\"add_bos_token\": true, \"bos_token\": \"<s>\"}" }, "E-TOK-ADDED", "<s>");
}

/* What one token strips may hold further tokens, as in HF: each is found, in linear time. One that strips to the left
 * finds nothing left of itself. */
static void stripping_is_linear(void **state) {
    (void)state;
    tokenizer *t = opened(&(toytok){ .added = "[" TOKEN(256, " ", ", \"rstrip\": true") "]" });
    buf text = { 0 };
    id_list a = { 0 };
    err e = { 0 };
    for (int i = 0; i < 300000; i++) buf_byte(&text, ' ');
    const double t0 = cpu_seconds();
    assert_true(tokenizer_encode(t, &a, buf_view(&text), NULL, &e));
    assert_int_equal(a.n, 300000);
    assert_true(cpu_seconds() - t0 < 20); /* quadratic: minutes */
    ids_free(&a);
    buf_free(&text);
    tokenizer_close(t);
    gives(
        &(toytok){ .added = "[" TOKEN(256, "<m>", ", \"rstrip\": true") "," TOKEN(257, " ", ", \"rstrip\": true") "]" },
        "<m>  a", "256 257 257 64");
    gives(
        &(toytok){ .added = "[" TOKEN(256, "<m>", ", \"rstrip\": true") "," TOKEN(257, " ", ", \"lstrip\": true") "]" },
        "<m>  a", "256 64");
}

/* ---- hostile files ---- */

static void vocabularies(void **state) {
    (void)state;
    static const char *const bad[] = { "{\"a\": 0, \"a\": 1}",
                                       "{\"a\": 0, \"b\": 0}",
                                       "{\"a\": -1}",
                                       "{\"a\": 1.5}",
                                       "{\"a\": \"0\"}",
                                       "{\"a\": null}",
                                       "{\"a\": 1000000000}",
                                       "{\"a\": 2147483648}",
                                       "{\"a\": 99999999999999999999}",
                                       "{}" };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) refused(&(toytok){ .vocab = bad[i] }, "E-TOK-VOCAB", "");
    refused(&(toytok){ .vocab = "[]" }, "E-TOK-MODEL", "vocab");
    refused(&(toytok){ .vocab = "null" }, "E-TOK-MODEL", "vocab");
}

static void merges(void **state) {
    (void)state;
    static const char *const bad[] = { "[[\"a\", \"b\"]]",
                                       "[[\"zz\", \"b\"]]",
                                       "[[\"a\", \"zz\"]]",
                                       "[[\"a\"]]",
                                       "[[\"a\", \"b\", \"c\"]]",
                                       "[\"ab\"]",
                                       "[\"a b c\"]",
                                       "[1]",
                                       "[null]",
                                       "[[\"a\", 1]]",
                                       "[\"a x\", [\"a\", \"x\"]]",
                                       "[\"\"]",
                                       "[{}]",
                                       "[\" a\"]" };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        refused(&(toytok){ .vocab_more = ", \"ax\": 256", .merges = bad[i] }, "E-TOK-MERGE", "");
    refused(&(toytok){ .merges = "{}" }, "E-TOK-MODEL", "merges");
    refused(&(toytok){ .merges = "null" }, "E-TOK-MODEL", "merges");
    /* An empty token, and one outside the byte alphabet, may merge on paper; no text gets there. */
    gives(&(toytok){ .vocab_more = ", \"\": 256, \"\xE8\xAA\x9E\": 257, \"\xE8\xAA\x9E"
                                   "a\": 258",
                     .merges = "[[\"\", \"a\"], [\"a\", \"\"], [\"\xE8\xAA\x9E\", \"a\"]]" },
          "aa\xE8\xAA\x9E"
          "a",
          "64 64 164 103 252 64");
}

static void broken_files(void **state) {
    (void)state;
    static const struct {
        const char *text, *id;
    } cases[] = {
        { "", "E-JSON-SYNTAX" },
        { "{", "E-JSON-SYNTAX" },
        { "[]", "E-TOK-MODEL" },
        { "{}", "E-TOK-MODEL" },
        { "null", "E-TOK-MODEL" },
        { "{\"model\": 3}", "E-TOK-MODEL" },
        { "{\"model\": {}}", "E-TOK-MODEL" },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *dir = scratch_new();
        tokenizer *t = NULL;
        err e = { 0 };
        free(scratch_puts(dir, "tokenizer.json", cases[i].text));
        assert_false(tokenizer_open(&t, dir, &e));
        assert_string_equal(e.id, cases[i].id);
        scratch_free(dir);
    }
    tokenizer *t = NULL;
    err e = { 0 };
    assert_false(tokenizer_open(&t, "/nonexistent", &e));
    assert_string_equal(e.id, "E-FILE-OPEN");
}

/* What decoding writes for added tokens: HF reads those written in the byte alphabet as bytes. */
static void decoding_added(void **state) {
    (void)state;
    tokenizer *t = opened(&(toytok){
        .added = "[" TOKEN(256, "\\u0120q", "") "," TOKEN(257, "a b", "") "," TOKEN(258, "\xE8\xAA\x9E", "") "]" });
    buf out = { 0 };
    err e = { 0 };
    const int32_t v[] = { 256, 257, 258 };
    assert_true(tokenizer_decode(t, &out, v, 3, false, &e));
    assert_string_equal(out.p, " qa b\xE8\xAA\x9E");
    assert_int_equal(tokenizer_find(t, STR("\xC4\xA0q")), 256);
    buf_free(&out);
    tokenizer_close(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(normalizers),    cmocka_unit_test(pre_tokenizers),
        cmocka_unit_test(behaviors),      cmocka_unit_test(post_processors_and_decoders),
        cmocka_unit_test(model_settings), cmocka_unit_test(repeated_merge),
        cmocka_unit_test(warnings),       cmocka_unit_test(added_tokens),
        cmocka_unit_test(config_adds),    cmocka_unit_test(stripping_is_linear),
        cmocka_unit_test(vocabularies),   cmocka_unit_test(merges),
        cmocka_unit_test(broken_files),   cmocka_unit_test(decoding_added),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
