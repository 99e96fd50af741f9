/* nibble tokenize and detokenize: text to token ids and back. They need only the tokenizer's files. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "cmd/cmd.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

enum { STDIN_MAX = 1 << 30, FILE_BYTES_MAX = 1 << 30 };

/* A file, or standard input for "-". */
static bool read_input(buf *out, const char *path, err *e) {
    if (strcmp(path, "-") != 0) return file_read(out, path, FILE_BYTES_MAX, e);
    char part[1 << 16];
    size_t n;
    while ((n = fread(part, 1, sizeof part, stdin)) > 0) {
        if (out->n + n > STDIN_MAX) return fail(e, ERR_INPUT, "E-TEXT-SIZE", "standard input: more than 1 GiB");
        buf_add(out, part, n);
    }
    if (ferror(stdin)) return fail(e, ERR_MACHINE, "E-CMD-STDIN", "standard input: %s", strerror(errno));
    return true;
}

/* ---- tokenize ---- */

typedef struct tokenize_options {
    const char *text, *file;
    bool pieces, lossy, no_special, no_bos, lines;
} tokenize_options;

static void write_ids(buf *out, const id_list *a) {
    buf_byte(out, '[');
    for (size_t i = 0; i < a->n; i++) buf_printf(out, "%s%d", i ? ", " : "", (int)a->v[i]);
    buf_byte(out, ']');
}

/* Bytes that are no whole character are written as \xHH. */
static void write_piece(buf *out, str bytes) {
    buf shown = { 0 };
    while (bytes.n) {
        const size_t ok = utf8_valid(bytes);
        buf_add(&shown, bytes.p, ok);
        bytes = str_skip(bytes, ok);
        if (bytes.n == 0) break;
        buf_printf(&shown, "\\x%02X", (unsigned)(unsigned char)bytes.p[0]);
        bytes = str_skip(bytes, 1);
    }
    json_write_str(out, buf_view(&shown));
    buf_free(&shown);
}

static void write_pieces(buf *out, const tokenizer *t, const id_list *a) {
    buf_byte(out, '[');
    for (size_t i = 0; i < a->n; i++) {
        if (i) buf_puts(out, ", ");
        write_piece(out, tokenizer_bytes(t, a->v[i]));
    }
    buf_byte(out, ']');
}

static bool tokenize_one(const tokenizer *t, const tokenize_options *o, str text, err *e) {
    const encode_options how = { .lossy = o->lossy, .no_special = o->no_special, .bos = !o->no_bos };
    id_list a = { 0 };
    buf out = { 0 };
    const bool ok = tokenizer_encode(t, &a, text, &how, e);
    if (ok && cmd_common()->json) {
        buf_puts(&out, "{\"schema\": \"nibble.tokenize/1\", \"ids\": ");
        write_ids(&out, &a);
        if (o->pieces) buf_puts(&out, ", \"pieces\": "), write_pieces(&out, t, &a);
        buf_printf(&out, ", \"count\": %zu}", a.n);
    } else if (ok && o->pieces) {
        write_pieces(&out, t, &a);
    } else if (ok) {
        write_ids(&out, &a);
    }
    if (ok) {
        buf_byte(&out, '\n');
        fwrite(out.p, 1, out.n, stdout);
    }
    buf_free(&out);
    ids_free(&a);
    return ok;
}

/* Every line of the text is a JSON string: one result line for each. */
static bool tokenize_lines(const tokenizer *t, const tokenize_options *o, str text, err *e) {
    for (size_t line = 1; text.n; line++) {
        const char *end = memchr(text.p, '\n', text.n);
        const str one = { text.p, end ? (size_t)(end - text.p) : text.n };
        arena mem = { 0 };
        const json *v = NULL;
        bool ok = json_parse(&v, &mem, one, "line", NULL, e);
        if (ok && v->type != JSON_STRING) ok = fail(e, ERR_INPUT, "E-CMD-LINE", "not a JSON string");
        ok = ok && tokenize_one(t, o, json_str(v), e);
        arena_free(&mem);
        if (!ok) return fail_prefix(e, "line %zu", line);
        text = str_skip(text, one.n + (end != NULL));
    }
    return true;
}

static bool tokenize(const char *dir, const tokenize_options *o, err *e) {
    tokenizer *t = NULL;
    buf input = { 0 };
    bool ok = o->file ? read_input(&input, o->file, e) : true;
    const str text = o->file ? buf_view(&input) : str_of(o->text);
    ok = ok && tokenizer_open(&t, dir, e);
    ok = ok && (o->lines ? tokenize_lines(t, o, text, e) : tokenize_one(t, o, text, e));
    tokenizer_close(t);
    buf_free(&input);
    return ok;
}

int cmd_tokenize(int argc, char **argv, err *e) {
    tokenize_options o = { 0 };
    const arg_opt opts[] = {
        { .type = ARG_STR, .name = "text", .meta = "TEXT", .dst = &o.text, .help = "the text" },
        { .type = ARG_STR,
          .name = "file",
          .key = 'f',
          .meta = "FILE",
          .dst = &o.file,
          .help = "a file with the text; - is standard input" },
        { .type = ARG_FLAG,
          .name = "pieces",
          .dst = &o.pieces,
          .help = "show the text of each token (\\xHH: part of a character)" },
        { .type = ARG_FLAG, .name = "lossy", .dst = &o.lossy, .help = "replace what is not valid UTF-8 by U+FFFD" },
        { .type = ARG_FLAG,
          .name = "no-special",
          .dst = &o.no_special,
          .help = "text that spells a special token is ordinary text" },
        { .type = ARG_FLAG,
          .name = "no-bos",
          .dst = &o.no_bos,
          .help = "no BOS even if tokenizer_config.json asks for one" },
        { .type = ARG_FLAG,
          .name = "lines",
          .dst = &o.lines,
          .help = "every line is a JSON string; one result line for each" },
    };
    const arg_spec spec = { .usage = "tokenize [options] [DIR] (--text TEXT | --file FILE)",
                            .about = "Print the token ids of a text as a JSON list.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .max_positional = 1,
                            .examples = "  nibble tokenize --text 'Hello, world!'\n"
                                        "  nibble tokenize Qwen3.6-35B-A3B --file notes.txt --pieces\n" };
    arg_strings pos = { 0 };
    const char *dir;
    bool done = false;
    bool ok = cmd_parse(&spec, argc, argv, &pos, &done, e);
    if (ok && !done && !o.text == !o.file) ok = fail(e, ERR_USAGE, "E-USAGE", "tokenize: give --text or --file");
    ok = ok && (done || (cmd_model_dir(&dir, &pos, 0, e) && tokenize(dir, &o, e)));
    arg_strings_free(&pos);
    return ok ? 0 : err_exit_code(e->kind);
}

/* ---- detokenize ---- */

typedef struct detokenize_options {
    const char *ids;
    bool skip_special;
} detokenize_options;

static bool read_ids(id_list *out, const json *v, err *e) {
    if (json_is(v, JSON_OBJECT)) v = json_get(v, "ids");
    if (!json_is(v, JSON_ARRAY)) return fail(e, ERR_INPUT, "E-CMD-IDS", "--ids: expected a JSON list of token ids");
    for (uint32_t i = 0; i < v->n; i++) {
        const json *x = &v->u.items[i];
        if (!json_is(x, JSON_INT) || x->u.i < 0 || x->u.i > INT32_MAX)
            return fail(e, ERR_INPUT, "E-CMD-IDS", "--ids: element %u is not a token id", i);
        ids_add(out, (int32_t)x->u.i);
    }
    return true;
}

/* The JSON itself, @FILE, or - for standard input. */
static bool parse_ids(id_list *out, const char *arg, err *e) {
    buf input = { 0 };
    arena mem = { 0 };
    const json *v = NULL;
    bool ok = true;
    if (arg[0] == '@')
        ok = read_input(&input, arg + 1, e);
    else if (strcmp(arg, "-") == 0)
        ok = read_input(&input, arg, e);
    else
        buf_puts(&input, arg);
    ok = ok && json_parse(&v, &mem, buf_view(&input), "--ids", NULL, e) && read_ids(out, v, e);
    arena_free(&mem);
    buf_free(&input);
    return ok;
}

static bool detokenize(const char *dir, const detokenize_options *o, err *e) {
    tokenizer *t = NULL;
    id_list a = { 0 };
    buf text = { 0 }, out = { 0 };
    const bool ok = parse_ids(&a, o->ids, e) && tokenizer_open(&t, dir, e) &&
                    tokenizer_decode(t, &text, a.v, a.n, o->skip_special, e);
    if (ok && cmd_common()->json) {
        buf shown = { 0 };
        utf8_replace(&shown, buf_view(&text));
        buf_puts(&out, "{\"schema\": \"nibble.detokenize/1\", \"text\": ");
        json_write_str(&out, buf_view(&shown));
        buf_puts(&out, "}\n");
        fwrite(out.p, 1, out.n, stdout);
        buf_free(&shown);
    } else if (ok) {
        fwrite(text.p ? text.p : "", 1, text.n, stdout);
    }
    tokenizer_close(t);
    ids_free(&a);
    buf_free(&text);
    buf_free(&out);
    return ok;
}

int cmd_detokenize(int argc, char **argv, err *e) {
    detokenize_options o = { 0 };
    const arg_opt opts[] = {
        { .type = ARG_STR,
          .name = "ids",
          .meta = "JSON",
          .dst = &o.ids,
          .help = "list of token ids; @FILE reads a file, - standard input" },
        { .type = ARG_FLAG, .name = "skip-special", .dst = &o.skip_special, .help = "leave special tokens out" },
    };
    const arg_spec spec = { .usage = "detokenize [options] [DIR] --ids JSON",
                            .about = "Write the bytes that token ids stand for, nothing added.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .max_positional = 1,
                            .examples = "  nibble detokenize --ids '[597, 11, 805, 689, 0]'\n" };
    arg_strings pos = { 0 };
    const char *dir;
    bool done = false;
    bool ok = cmd_parse(&spec, argc, argv, &pos, &done, e);
    if (ok && !done && !o.ids) ok = fail(e, ERR_USAGE, "E-USAGE", "detokenize: give --ids");
    ok = ok && (done || (cmd_model_dir(&dir, &pos, 0, e) && detokenize(dir, &o, e)));
    arg_strings_free(&pos);
    return ok ? 0 : err_exit_code(e->kind);
}
