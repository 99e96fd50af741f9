/* nibble check: is a checkpoint sound? */
#include <stdio.h>

#include "check/check.h"
#include "cmd/calibration.h"
#include "cmd/cmd.h"

static void print(const check_report *r, const char *dir) {
    buf text = { 0 };
    if (cmd_common()->json)
        check_json(&text, r, dir, NULL);
    else
        check_text(&text, r, cmd_common()->verbose > 0);
    fwrite(text.p, 1, text.n, stdout);
    buf_free(&text);
}

static int run(const char *dir, const char *source, err *e) {
    progress bar = progress_begin("check");
    check_report r;
    const check_options o = { .source = source,
                              .threads = cmd_common()->threads,
                              .isa = cmd_ops_options().isa,
                              .on_progress = bar.tty && !cmd_common()->quiet ? progress_bytes : NULL,
                              .ctx = &bar,
                              .cancel = cmd_interrupt_all() };
    const bool ok = check_run(&r, dir, &o, e);
    progress_wipe(&bar);
    if (ok) print(&r, dir);
    const int code = ok && findings_of(&r.found, SEV_ERROR) ? 1 : 0;
    check_free(&r);
    return code;
}

int cmd_check(int argc, char **argv, err *e) {
    const char *source = NULL, *dir = NULL;
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Check" },
        { .type = ARG_STR,
          .name = "source",
          .meta = "SRC",
          .dst = &source,
          .help = "the model it was made from: compares values and bytes with it" },
    };
    const arg_spec spec = {
        .usage = "check [options] [MODEL_DIR]",
        .about = "Is this checkpoint sound? Reads every byte, stops at no fault, and reports one finding per "
                 "cause with its remedy. Exit status 1 when there is an error. -v names every tensor.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples = "  nibble check MODEL\n  nibble check EXPORT --source MODEL\n  nibble check EXPORT --json\n"
    };
    arg_strings pos = { 0 };
    bool done;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && cmd_model_dir(&dir, &pos, 0, e))
        code = run(dir, source, e);
    arg_strings_free(&pos);
    return code;
}
