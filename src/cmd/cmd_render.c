/* nibble render: the text that the checkpoint's chat template makes of a request. */
#include <stdio.h>

#include "base/arena.h"
#include "base/json.h"
#include "cmd/cmd.h"
#include "text/template.h"

static bool open_template(chat_template **out, const char *file, const arg_strings *pos, err *e) {
    const char *dir = NULL;
    if (!file) return cmd_model_dir(&dir, pos, 0, e) && template_open(out, dir, e);
    if (!template_open_file(out, file, e)) return false;
    if (pos->n == 0 || template_read_tokens(*out, pos->v[0], e)) return true;
    template_close(*out);
    *out = NULL;
    return false;
}

static void print_result(const buf *text, bool as_json) {
    if (!as_json) {
        fwrite(text->p, 1, text->n, stdout);
        return;
    }
    buf b = { 0 };
    buf_puts(&b, "{\"schema\": \"nibble.render/1\", \"text\": ");
    json_write_str(&b, buf_view(text));
    buf_puts(&b, "}\n");
    fwrite(b.p, 1, b.n, stdout);
    buf_free(&b);
}

static bool render(const char *request, const char *file, const arg_strings *pos, buf *text, err *e) {
    arena mem = { 0 };
    const json *v = NULL;
    chat_template *t = NULL;
    bool ok = json_parse_file(&v, &mem, request, NULL, e) && open_template(&t, file, pos, e);
    if (ok && v->type != JSON_OBJECT)
        ok = fail(e, ERR_INPUT, "E-TEMPLATE-REQUEST", "%s: not a JSON object (it needs at least messages)", request);
    if (ok && !template_render(t, text, v, e)) {
        ok = false;
        if (file || pos->n) fail_prefix(e, "%s", file ? file : pos->v[0]);
    }
    template_close(t);
    arena_free(&mem);
    return ok;
}

int cmd_render(int argc, char **argv, err *e) {
    const char *request = NULL, *file = NULL;
    const arg_opt opts[] = {
        { .type = ARG_STR,
          .name = "request",
          .meta = "R.json",
          .dst = &request,
          .help = "the request: an object with messages, "
                  "tools and whatever else the template reads" },
        { .type = ARG_STR,
          .name = "template",
          .meta = "FILE",
          .dst = &file,
          .help = "this template instead of the checkpoint's (special tokens still come from DIR when given)",
          .none = "" },
    };
    const arg_spec spec = {
        .usage = "render [options] [DIR] --request R.json",
        .about =
            "Print the text that the checkpoint's chat template makes of a request, exactly, with no newline added.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples = "  nibble render --request chat.json\n  nibble render Qwen3.6-35B-A3B --request chat.json | nibble "
                    "tokenize ...\n",
    };
    arg_strings pos = { 0 };
    bool done = false;
    buf text = { 0 };
    bool ok = cmd_parse(&spec, argc, argv, &pos, &done, e);
    if (ok && !done) {
        ok = request ? render(request, file, &pos, &text, e)
                     : fail(e, ERR_USAGE, "E-USAGE", "render: --request R.json is missing (see nibble render --help)");
        if (ok) print_result(&text, cmd_common()->json);
    }
    buf_free(&text);
    arg_strings_free(&pos);
    return ok ? 0 : err_exit_code(e->kind);
}
