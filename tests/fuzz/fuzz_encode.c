/* Any bytes as text for the embedded model's tokenizer: valid text comes back as its NFC form, streamed and whole; and
 * the direct scanner agrees with PCRE2. */
#include <stdio.h>
#include <stdlib.h>

#include "text/pretok.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static const char pattern[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|"
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

static void require(bool ok) {
    if (!ok) abort();
}

static void round_trip(const tokenizer *t, str text, const id_list *a) {
    buf out = { 0 }, streamed = { 0 }, nfc = { 0 };
    err e = { 0 };
    detok d = { 0 };
    require(tokenizer_decode(t, &out, a->v, a->n, false, &e));
    if (unicode_nfc_append(&nfc, text)) text = buf_view(&nfc);
    require(str_eq(buf_view(&out), text));
    for (size_t i = 0; i < a->n; i++) detok_push(t, &d, a->v[i], false, &streamed);
    detok_end(&d, &streamed);
    require(str_eq(buf_view(&streamed), text));
    buf_free(&out);
    buf_free(&streamed);
    buf_free(&nfc);
}

static void both_splitters(const splitter *s, str text) {
    spans a = { 0 }, b = { 0 };
    err e = { 0 };
    require(splitter_run(s, &a, text, false, &e) && splitter_run(s, &b, text, true, &e));
    require(a.n == b.n);
    for (size_t i = 0; i < a.n; i++) require(a.v[i].end == b.v[i].end && a.v[i].match == b.v[i].match);
    spans_free(&a);
    spans_free(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    static tokenizer *t;
    static splitter *s;
    const str text = { (const char *)p, n };
    err e = { 0 };
    if (!t) require(tokenizer_open(&t, "assets/qwen36-tiny", &e) && splitter_open(&s, STR(pattern), false, &e));
    id_list a = { 0 };
    const bool valid = utf8_valid(text) == n;
    require(tokenizer_encode(t, &a, text, NULL, &e) == valid);
    if (valid) {
        round_trip(t, text, &a);
        both_splitters(s, text);
    } else {
        err f = { 0 };
        require(a.n == 0 && tokenizer_encode(t, &a, text, &(encode_options){ .lossy = true }, &f));
    }
    ids_free(&a);
    return 0;
}
