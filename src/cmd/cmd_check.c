/* nibble check: is a checkpoint sound? */
#include <stdio.h>
#include <string.h>

#include "check/check.h"
#include "cmd/calibration.h"
#include "cmd/cmd.h"

static void print(const check_report *r, const char *dir) {
    buf text = { 0 };
    if (cmd_common()->json)
        check_json(&text, r, dir);
    else
        check_text(&text, r, cmd_common()->verbose > 0);
    fwrite(text.p, 1, text.n, stdout);
    buf_free(&text);
}

static void print_list(void) {
    buf text = { 0 };
    target_list(&text);
    fwrite(text.p, 1, text.n, stdout);
    buf_free(&text);
}

enum { MAX_TARGETS = 64 };

typedef struct options {
    const char *source, *fix;
    arg_strings target;
    bool list;
    target targets[MAX_TARGETS];
    int n_targets;
} options;

static bool read_targets(options *o, err *e) {
    for (int i = 0; i < o->target.n; i++) {
        const bool all = strcmp(o->target.v[i], "all") == 0;
        if (strcmp(o->target.v[i], "list") == 0) {
            o->list = true;
            continue;
        }
        for (int k = 0; all ? target_name(k) != NULL : k < 1; k++) {
            if (o->n_targets == MAX_TARGETS)
                return fail(e, ERR_USAGE, "E-USAGE", "--target: more than %d", MAX_TARGETS);
            if (!target_parse(&o->targets[o->n_targets++], all ? target_name(k) : o->target.v[i], e)) return false;
        }
    }
    return true;
}

static bool fix(check_view *v, const options *own, err *e) {
    buf done = { 0 };
    const bool ok = view_fix(&done, v, own->fix, own->source, e);
    if (ok && !cmd_common()->json) printf("%s%s", done.n ? done.p : "nothing to repair\n", "\n");
    buf_free(&done);
    return ok;
}

static int run(const char *dir, options *own, err *e) {
    progress bar = progress_begin("check");
    check_report r;
    const check_options o = { .source = own->source,
                              .targets = own->targets,
                              .n_targets = own->n_targets,
                              .threads = cmd_common()->threads,
                              .isa = cmd_ops_options().isa,
                              .on_progress = bar.tty && !cmd_common()->quiet ? progress_bytes : NULL,
                              .ctx = &bar,
                              .cancel = cmd_interrupt_all() };
    const bool ok = check_run(&r, dir, &o, e);
    progress_wipe(&bar);
    if (ok && own->fix) {
        const char *out = own->fix;
        const bool made = fix(&r.view, own, e);
        check_free(&r);
        own->fix = NULL;
        return made ? run(out, own, e) : 0; /* the report is of what was made */
    }
    if (ok) print(&r, dir);
    const int code = ok && findings_of(&r.found, SEV_ERROR) ? 1 : 0;
    check_free(&r);
    return code;
}

int cmd_check(int argc, char **argv, err *e) {
    const char *dir = NULL;
    options o = { 0 };
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Check" },
        { .type = ARG_STR,
          .name = "source",
          .meta = "SRC",
          .dst = &o.source,
          .help = "the model it was made from: compares values and bytes with it" },
        { .type = ARG_STR,
          .name = "fix",
          .meta = "OUT",
          .dst = &o.fix,
          .help = "make a repaired copy (dtype, excludes, index; with --source missing files too) and check that" },
        { .type = ARG_LIST,
          .name = "target",
          .meta = "NAME[@VER]",
          .dst = &o.target,
          .help =
              "what sglang, vllm, llama.cpp (conversion) or transformers make of it; `all`, or `list` (repeatable)" },
    };
    const arg_spec spec = {
        .usage = "check [options] [MODEL_DIR]",
        .about = "Is this checkpoint sound? Reads every byte, stops at no fault, and reports one finding per "
                 "cause with its remedy. Exit status 1 when there is an error. -v names every tensor.",
        .opts = opts,
        .count = ARRAY_LEN(opts),
        .max_positional = 1,
        .examples = "  nibble check MODEL\n  nibble check EXPORT --source MODEL\n  nibble check EXPORT --target "
                    "sglang@0.5.17 --target vllm\n"
    };
    arg_strings pos = { 0 };
    bool done;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && read_targets(&o, e)) {
        if (o.list)
            print_list();
        else if (cmd_model_dir(&dir, &pos, 0, e))
            code = run(dir, &o, e);
    }
    arg_strings_free(&o.target);
    arg_strings_free(&pos);
    return code;
}
