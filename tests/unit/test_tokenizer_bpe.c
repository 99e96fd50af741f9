/* Byte-pair encoding against a direct transcription of its definition, and its time on long words. */
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
#include <string.h>

#define ONE_WORD "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"use_regex\": false}"

enum { MERGES = 120, TOKEN_MAX = 24 };

/* A random vocabulary over a few letters: token k is the text of id k; merge k joins two earlier tokens. */
typedef struct made {
    char token[256 + MERGES][TOKEN_MAX];
    int left[MERGES], right[MERGES], result[MERGES]; /* id_list */
    int merges, tokens;
} made;

static int find(const made *m, const char *text) {
    for (int i = 0; i < m->tokens; i++)
        if (strcmp(m->token[i], text) == 0) return i;
    return -1;
}

static void make(made *m, rnd *r, int letters) {
    memset(m, 0, sizeof *m);
    for (int i = 0; i < 94; i++) m->token[i][0] = (char)(33 + i);
    m->tokens = 256; /* the others have no text here */
    int pool[26 + MERGES], n = 0;
    for (; n < letters; n++) pool[n] = 64 + n; /* 'a' is id 64 */
    for (int k = 0; k < MERGES; k++) {
        char text[2 * TOKEN_MAX];
        const int a = pool[rnd_below(r, (uint32_t)n)], b = pool[rnd_below(r, (uint32_t)n)];
        snprintf(text, sizeof text, "%s%s", m->token[a], m->token[b]);
        if (strlen(text) >= TOKEN_MAX) continue;
        int id = find(m, text); /* sometimes another way to a token that exists */
        if (id < 0) {
            id = m->tokens++;
            snprintf(m->token[id], TOKEN_MAX, "%.*s", TOKEN_MAX - 1, text);
            pool[n++] = id;
        }
        m->left[m->merges] = a;
        m->right[m->merges] = b;
        m->result[m->merges++] = id;
    }
}

static tokenizer *build(const made *m, bool pairs, const char *more) {
    buf vocab = { 0 }, merges = { 0 };
    tokenizer *t = NULL;
    err e = { 0 };
    for (int i = 256; i < m->tokens; i++) buf_printf(&vocab, ", \"%s\": %d", m->token[i], i);
    buf_puts(&vocab, "");
    buf_byte(&merges, '[');
    for (int k = 0; k < m->merges; k++)
        buf_printf(&merges, pairs ? "%s[\"%s\", \"%s\"]" : "%s\"%s %s\"", k ? ", " : "", m->token[m->left[k]],
                   m->token[m->right[k]]);
    buf_byte(&merges, ']');
    if (!toytok_open(&t, &(toytok){ .pre = ONE_WORD, .vocab_more = vocab.p, .merges = merges.p, .model_more = more },
                     &e))
        fail_msg("%s: %s", e.id, e.msg);
    buf_free(&vocab);
    buf_free(&merges);
    return t;
}

/* Rank of a pair: the last place in the list where it stands. */
static int rank_of(const made *m, int a, int b) {
    for (int k = m->merges - 1; k >= 0; k--)
        if (m->left[k] == a && m->right[k] == b) return k;
    return -1;
}

/* The definition: merge the pair of lowest rank, the leftmost of equals, until there is none. */
static int by_definition(const made *m, int *id, int n) {
    for (;;) {
        int best = -1, rank = MERGES;
        for (int i = 0; i + 1 < n; i++) {
            const int k = rank_of(m, id[i], id[i + 1]);
            if (k >= 0 && k < rank) {
                rank = k;
                best = i;
            }
        }
        if (best < 0) return n;
        id[best] = m->result[rank];
        memmove(id + best + 1, id + best + 2, (size_t)(n - best - 2) * sizeof *id);
        n--;
    }
}

static void equals_definition(void **state) {
    (void)state;
    rnd r = rnd_open(1);
    made *m = malloc(sizeof *m);
    for (int round = 0; round < 60; round++) {
        const int letters = 1 + (int)rnd_below(&r, 4);
        make(m, &r, letters);
        tokenizer *t = build(m, round & 1, NULL);
        for (int k = 0; k < 60; k++) {
            char word[400];
            int id[400], n = 1 + (int)rnd_below(&r, k % 4 == 0 ? 300 : 48);
            for (int i = 0; i < n; i++) {
                id[i] = 64 + (int)rnd_below(&r, (uint32_t)letters);
                word[i] = m->token[id[i]][0];
            }
            id_list a = { 0 };
            err e = { 0 };
            assert_true(tokenizer_encode(t, &a, (str){ word, (size_t)n }, NULL, &e));
            n = by_definition(m, id, n);
            assert_int_equal(a.n, n);
            for (int i = 0; i < n; i++) assert_int_equal(a.v[i], id[i]);
            ids_free(&a);
        }
        tokenizer_close(t);
    }
    free(m);
}

/* Tokens that their own bytes do not lead to: only ignore_merges gives them. */
static void unreachable_tokens(void **state) {
    (void)state;
    for (int ignore = 0; ignore < 2; ignore++) {
        tokenizer *t = NULL;
        err e = { 0 };
        const toytok s = { .pre = ONE_WORD,
                           .vocab_more = ", \"bc\": 256, \"abc\": 257, \"ab\": 258",
                           .merges = "[\"b c\", \"a b\", \"ab c\"]",
                           .model_more = ignore ? ", \"ignore_merges\": true" : NULL };
        assert_true(toytok_open(&t, &s, &e));
        for (int twice = 0; twice < 2; twice++) /* the first time it is found out, the second time remembered */
            assert_string_equal(toytok_ids(t, STR("abc"), NULL), ignore ? "257" : "64 256");
        assert_string_equal(toytok_ids(t, STR("xabc"), NULL), "87 64 256");
        tokenizer_close(t);
    }
}

/* 16 times the word may take at most 60 times as long (n log n and caches: about 25; quadratic: 256). */
static void long_words(void **state) {
    (void)state;
    static const char *const units[] = { "a",  " ",        "\n",        "_",          "7", "ab", "\xE4\xB8\xAD",
                                         "Zq", "\xCC\x81", "x\xCC\x81", "<|im_end|>", "<|" };
    tokenizer *t;
    err e = { 0 };
    rnd r = rnd_open(2);
    assert_true(tokenizer_open(&t, "assets/qwen36-tiny", &e));
    for (size_t u = 0; u <= ARRAY_LEN(units); u++) {
        buf text = { 0 };
        double spent[2];
        for (int i = 0; i < 2; i++) {
            while (text.n < (i ? 524288u : 32768u)) {
                if (u < ARRAY_LEN(units))
                    buf_puts(&text, units[u]);
                else
                    buf_byte(&text, (char)('a' + rnd_below(&r, 26))); /* one random word */
            }
            spent[i] = 1e9;
            for (int k = 0; k < 3; k++) {
                id_list a = { 0 };
                const double t0 = cpu_seconds();
                assert_true(tokenizer_encode(t, &a, buf_view(&text), NULL, &e));
                const double t1 = cpu_seconds() - t0;
                if (t1 < spent[i]) spent[i] = t1;
                ids_free(&a);
            }
        }
        if (spent[1] > 60 * spent[0] + 0.05)
            fail_msg("unit %zu: %.4f s, then %.4f s for 16 times as much", u, spent[0], spent[1]);
        buf_free(&text);
    }
    tokenizer_close(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_definition),
        cmocka_unit_test(unreachable_tokens),
        cmocka_unit_test(long_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
