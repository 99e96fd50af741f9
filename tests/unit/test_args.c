#include "base/args.h" /* before cmocka.h, which defines a macro `fail` */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const char *const isas[] = { "ref", "avx2", "avx512", NULL };

typedef struct opts {
    bool json, tokens_given;
    int tokens, think, verbose, isa;
    int64_t memory, seed;
    double temperature;
    const char *prompt, *out;
    arg_strings stops, pos;
    bool help;
} opts;

static bool parse(opts *o, err *e, int argc, char *const *argv, buf *help) {
    *o = (opts){ .tokens = 512, .think = -1, .temperature = 0.7, .memory = 1 << 20, .out = "-" };
    const arg_opt table[] = {
        { .type = ARG_STR, .name = "prompt", .key = 'p', .dst = &o->prompt, .help = "one user message" },
        { .type = ARG_STR, .name = "output", .key = 'o', .meta = "FILE", .dst = &o->out, .help = "where to write" },
        { .type = ARG_GROUP, .help = "Sampling" },
        { .type = ARG_INT,
          .name = "max-tokens",
          .key = 'n',
          .dst = &o->tokens,
          .given = &o->tokens_given,
          .lo = 1,
          .hi = 4096,
          .help = "stop after this many tokens, however long the sentence about it in the help text may become" },
        { .type = ARG_DOUBLE,
          .name = "temperature",
          .dst = &o->temperature,
          .flo = 0,
          .fhi = 2,
          .help = "0 is greedy" },
        { .type = ARG_INT64, .name = "seed", .dst = &o->seed, .help = "seed", .none = "random" },
        { .type = ARG_LIST, .name = "stop", .dst = &o->stops, .help = "stop text" },
        { .type = ARG_SET, .name = "think", .dst = &o->think, .value = 1, .help = "think" },
        { .type = ARG_SET, .name = "no-think", .dst = &o->think, .value = 0, .help = "do not" },
    };
    const arg_opt common[] = {
        { .type = ARG_GROUP, .help = "Common" },
        { .type = ARG_FLAG, .name = "json", .key = 'j', .dst = &o->json, .help = "one JSON object" },
        { .type = ARG_COUNT, .name = "verbose", .key = 'v', .dst = &o->verbose, .help = "say more" },
        { .type = ARG_ENUM, .name = "isa", .dst = &o->isa, .choices = isas, .help = "cap" },
        { .type = ARG_BYTES, .name = "memory", .dst = &o->memory, .help = "limit" },
    };
    const arg_spec spec = { .usage = "run [options] [DIR]",
                            .about = "Answer.",
                            .opts = table,
                            .count = ARRAY_LEN(table),
                            .common = common,
                            .common_count = ARRAY_LEN(common),
                            .max_positional = 1,
                            .examples = "  nibble run -p hello\n" };
    const bool ok = args_parse(&spec, argc, argv, &o->pos, &o->help, e);
    if (help) args_help(help, &spec);
    return ok;
}

#define ARGV(...) ((char *const *)(const char *const[]){ "run", __VA_ARGS__ })
#define ARGC(...) ((int)ARRAY_LEN(((const char *const[]){ "run", __VA_ARGS__ })))
#define PARSE(o, e, ...) parse(o, e, ARGC(__VA_ARGS__), ARGV(__VA_ARGS__), NULL)

static void done(opts *o) {
    arg_strings_free(&o->stops);
    arg_strings_free(&o->pos);
}

static void forms(void **state) {
    (void)state;
    opts o;
    err e = { 0 };
    assert_true(
        PARSE(&o, &e, "--max-tokens", "7", "--temperature=0.5", "-p", "-x", "dir", "-jvv", "-ofile", "--seed", "-3"));
    assert_int_equal(o.tokens, 7);
    assert_true(o.tokens_given);
    assert_true(o.temperature == 0.5);
    assert_string_equal(o.prompt, "-x"); /* a value may look like an option that does not exist */
    assert_string_equal(o.out, "file");
    assert_true(o.json);
    assert_int_equal(o.verbose, 2);
    assert_int_equal(o.seed, -3);
    assert_int_equal(o.pos.n, 1);
    assert_string_equal(o.pos.v[0], "dir");
    assert_int_equal(o.think, -1);
    done(&o);

    assert_true(PARSE(&o, &e, "--stop", "a", "--stop=", "--think", "--no-think", "--isa", "avx2", "--memory", "1.5GiB",
                      "--prompt=--json"));
    assert_int_equal(o.stops.n, 2);
    assert_string_equal(o.stops.v[1], "");
    assert_int_equal(o.think, 0);
    assert_int_equal(o.isa, 1);
    assert_int_equal(o.memory, (int64_t)3 << 29);
    assert_string_equal(o.prompt, "--json");
    assert_false(o.json);
    assert_false(o.tokens_given);
    done(&o);

    assert_true(PARSE(&o, &e, "-", "--"));
    assert_string_equal(o.pos.v[0], "-");
    done(&o);
    assert_true(PARSE(&o, &e, "--", "--json"));
    assert_string_equal(o.pos.v[0], "--json");
    assert_false(o.json);
    done(&o);
    assert_true(parse(&o, &e, 1, ARGV(""), NULL));
    assert_int_equal(o.pos.n, 0);
    assert_int_equal(e.kind, ERR_NONE);
}

static void refuse(const char *message, int argc, char *const *argv) {
    opts o;
    err e = { 0 };
    assert_false(parse(&o, &e, argc, argv, NULL));
    assert_int_equal(e.kind, ERR_USAGE);
    assert_string_equal(e.id, "E-USAGE");
    assert_string_equal(e.msg, message);
    done(&o);
}
#define REFUSE(message, ...) refuse(message, ARGC(__VA_ARGS__), ARGV(__VA_ARGS__))

static void refusals(void **state) {
    (void)state;
    REFUSE("--max-token: unknown option (did you mean --max-tokens?)", "--max-token", "7");
    REFUSE("--maxtokens: unknown option (did you mean --max-tokens?)", "--maxtokens=7");
    REFUSE("--temp: unknown option (did you mean --temperature?)", "--temp", "1");
    REFUSE("--hlep: unknown option (did you mean --help?)", "--hlep");
    REFUSE("--xyzzy: unknown option (--help lists all)", "--xyzzy");
    REFUSE("-x: unknown option (--help lists all)", "-x");
    REFUSE("--max-tokens: needs a value", "--max-tokens");
    REFUSE("--output: needs a value, found --json", "-o", "--json");
    REFUSE("--prompt: needs a value, found --", "-p", "--");
    REFUSE("--json: takes no value", "--json=yes");
    REFUSE("--max-tokens: '' is no whole number", "--max-tokens=");
    REFUSE("--max-tokens: ' 7' is no whole number", "--max-tokens", " 7");
    REFUSE("--max-tokens: '7x' is no whole number", "--max-tokens", "7x");
    REFUSE("--max-tokens: '1e3' is no whole number", "--max-tokens", "1e3");
    REFUSE("--max-tokens: 0 is out of range (1 to 4096)", "--max-tokens", "0");
    REFUSE("--max-tokens: 4294967297 is out of range (1 to 4096)", "-n4294967297");
    REFUSE("--seed: '99999999999999999999' is no whole number", "--seed", "99999999999999999999");
    REFUSE("--temperature: 'nan' is no number", "--temperature", "nan");
    REFUSE("--temperature: 'inf' is no number", "--temperature", "inf");
    REFUSE("--temperature: 2.5 is out of range (0 to 2)", "--temperature", "2.5");
    REFUSE("--isa: unknown value 'avx' (did you mean avx2? one of ref, avx2, avx512)", "--isa", "avx");
    REFUSE("--isa: unknown value 'sse' (one of ref, avx2, avx512)", "--isa", "sse");
    REFUSE("--memory: '-1' is no size (such as 512M or 4G)", "--memory", "-1");
    REFUSE("--memory: '4X' is no size (such as 512M or 4G)", "--memory", "4X");
    REFUSE("--memory: '99999999P' is no size (such as 512M or 4G)", "--memory", "99999999P");
    REFUSE("'b': one argument too many (usage: nibble run [options] [DIR])", "a", "b");
}

static void minimum(void **state) {
    (void)state;
    const arg_spec spec = { .usage = "inspect DIR", .min_positional = 1, .max_positional = 1 };
    bool help;
    err e = { 0 };
    assert_false(args_parse(&spec, 1, ARGV(""), NULL, &help, &e));
    assert_string_equal(e.msg, "an argument is missing (usage: nibble inspect DIR)");
    e = (err){ 0 };
    assert_true(args_parse(&spec, 2, ARGV("--help"), NULL, &help, &e));
    assert_true(help);
}

static void help_text(void **state) {
    (void)state;
    opts o;
    err e = { 0 };
    buf text = { 0 };
    assert_true(parse(&o, &e, 4, ARGV("--max-tokens", "7", "-h"), &text));
    assert_true(o.help);
    assert_int_equal(o.tokens, 512); /* the defaults shown are the defaults */
    const char *expect =
        "usage: nibble run [options] [DIR]\n\nAnswer.\n\nOptions\n"
        "  -p, --prompt TEXT           one user message\n"
        "  -o, --output FILE           where to write (default: -)\n"
        "\nSampling\n"
        "  -n, --max-tokens N          stop after this many tokens, however long the sentence about it in the\n"
        "                              help text may become (default: 512)\n"
        "      --temperature X         0 is greedy (default: 0.7)\n"
        "      --seed N                seed (default: random)\n"
        "      --stop TEXT             stop text (may be repeated)\n"
        "      --think                 think\n"
        "      --no-think              do not\n"
        "\nCommon\n"
        "  -j, --json                  one JSON object\n"
        "  -v, --verbose               say more\n"
        "      --isa ref|avx2|avx512   cap (default: ref)\n"
        "      --memory SIZE           limit (default: 1048576)\n"
        "  -h, --help                  this text\n"
        "\nExamples\n  nibble run -p hello\n";
    assert_string_equal(text.p, expect);
    buf_free(&text);
    done(&o);
}

static void nearest(void **state) {
    (void)state;
    const char *const names[] = { "run", NULL, "render", "inspect", "tokenize" };
    assert_string_equal(args_nearest("rnu", names, 5), "run");
    assert_string_equal(args_nearest("inspcet", names, 5), "inspect");
    assert_string_equal(args_nearest("tok", names, 5), "tokenize");
    assert_null(args_nearest("serve", names, 5));
    assert_null(args_nearest("", names, 5));
    char longer[400];
    memset(longer, 'a', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    assert_null(args_nearest(longer, names, 5));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forms),     cmocka_unit_test(refusals), cmocka_unit_test(minimum),
        cmocka_unit_test(help_text), cmocka_unit_test(nearest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
