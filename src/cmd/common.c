#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "cmd/cmd.h"

static const char *const isa_choices[] = { "best", "ref", "avx2", "avx512", "amx", "neon", "dotprod", NULL };
static const char *const device_choices[] = { "cpu", "ref", "cuda", NULL };
const char *const cmd_kv_choices[] = { "auto", "f32", "bf16", "fp8", NULL };
const char *const cmd_head_choices[] = { "auto", "full", "screened", NULL };
const char *const cmd_act_choices[] = { "auto", "fp4", "int8", "bf16", NULL };
static cmd_options common;

static const arg_opt common_options[] = {
    { .type = ARG_GROUP, .help = "Common" },
    { .type = ARG_INT,
      .name = "threads",
      .key = 't',
      .meta = "N",
      .dst = &common.threads,
      .lo = 0,
      .hi = 1024,
      .none = "all CPUs",
      .help = "compute threads; results do not depend on it" },
    { .type = ARG_ENUM,
      .name = "isa",
      .dst = &common.isa,
      .choices = isa_choices,
      .help = "highest instruction set to use; results do not depend on it" },
    { .type = ARG_ENUM,
      .name = "device",
      .dst = &common.device,
      .choices = device_choices,
      .help = "backend: `cuda` is an NVIDIA GPU, `ref` the slow serial reference; the same bits" },
    { .type = ARG_STR,
      .name = "experts",
      .meta = "cpu[:LAYERS]",
      .dst = &common.experts,
      .none = "on the device",
      .help = "with --device cuda: routed experts of LAYERS (0-19,30; all without) stay with the CPU, for GPUs of 8 to "
              "16 GB; the same bits" },
    { .type = ARG_FLAG, .name = "json", .dst = &common.json, .help = "print one JSON object" },
    { .type = ARG_FLAG, .name = "quiet", .key = 'q', .dst = &common.quiet, .help = "warnings and errors only" },
    { .type = ARG_COUNT, .name = "verbose", .key = 'v', .dst = &common.verbose, .help = "say more" },
};

cmd_options *cmd_common(void) { return &common; }

static bool read_experts(err *e) {
    common.cpu_experts = (layer_set){ 0 };
    const char *text = common.experts;
    if (!text) return true;
    if (strcmp(text, "cpu") == 0) return common.cpu_experts.all = true;
    if (strncmp(text, "cpu:", 4) == 0 && layer_set_parse(&common.cpu_experts, text + 4)) return true;
    return fail(e, ERR_USAGE, "E-USAGE", "--experts: '%.40s' is neither cpu nor cpu:LAYERS, like cpu:0-19,30", text);
}

bool cmd_parse(const arg_spec *spec, int argc, char **argv, arg_strings *pos, bool *done, err *e) {
    arg_spec full = *spec;
    full.common = common_options;
    full.common_count = ARRAY_LEN(common_options);
    if (!args_parse(&full, argc, argv, pos, done, e)) return false;
    if (*done) {
        buf text = { 0 };
        args_help(&text, &full);
        fwrite(text.p, 1, text.n, stdout);
        buf_free(&text);
    }
    log_set_level(common.quiet ? 0 : common.verbose ? 2 : 1);
    return read_experts(e);
}

ops_options cmd_ops_options(void) {
    ops_options o = { .device = device_choices[common.device],
                      .threads = common.threads,
                      .isa = ISA_COUNT,
                      .cpu_experts = common.cpu_experts };
    if (common.isa > 0 && !kern_isa_parse(&o.isa, isa_choices[common.isa])) o.isa = ISA_COUNT;
    return o;
}

/* ---- the embedded model ---- */

static char *try_dir(char *base, const char *tail) {
    char *dir = path_join(base, tail), *config = path_join(dir, "config.json");
    const bool ok = file_exists(config);
    free(config);
    if (ok) return dir;
    free(dir);
    return NULL;
}

/* Beside the installed program, else up from a build folder of the source tree. */
static char *find_embedded(void) {
    char exe[PATH_MAX];
    const ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    if (n <= 0) return NULL;
    exe[n] = 0;
    for (char *slash = strrchr(exe, '/'); slash && slash != exe; slash = strrchr(exe, '/')) {
        *slash = 0;
        char *dir = try_dir(exe, "share/nibble/qwen36-tiny");
        if (!dir) dir = try_dir(exe, "assets/qwen36-tiny");
        if (dir) return dir;
    }
    return NULL;
}

bool cmd_model_dir(const char **out, const arg_strings *pos, int index, err *e) {
    static char *embedded;
    if (pos->n > index) return *out = pos->v[index], true;
    if (!embedded) embedded = find_embedded();
    if (!embedded)
        return fail(e, ERR_USAGE, "E-CMD-MODEL",
                    "no model given, and the embedded one (share/nibble/qwen36-tiny) is not "
                    "installed beside this program (name a model directory)");
    log_say("N-CMD-EMBEDDED", "no model given: using the embedded qwen36-tiny");
    return *out = embedded, true;
}

/* ---- Ctrl-C ---- */

static volatile int interrupted;

static void on_sigint(int sig) {
    (void)sig;
    if (interrupted) _exit(130);
    interrupted = 1;
}

volatile const int *cmd_interrupt(void) {
    struct sigaction sa = { .sa_handler = on_sigint };
    sigemptyset(&sa.sa_mask);
    sigaction(SIGINT, &sa, NULL);
    interrupted = 0;
    return &interrupted;
}

volatile const int *cmd_interrupt_all(void) {
    static bool installed;
    if (installed) return &interrupted; /* a signal between two steps must not be forgotten */
    installed = true;
    volatile const int *flag = cmd_interrupt();
    struct sigaction sa = { .sa_handler = on_sigint };
    sigemptyset(&sa.sa_mask);
    sigaction(SIGTERM, &sa, NULL);
    return flag;
}

/* ---- sampling ---- */

void cmd_sampling_options(arg_opt *o, cmd_sampling *s) {
    *s = (cmd_sampling){ .top_p = 1, .repetition = 1, .max_tokens = 1024 };
    const arg_opt table[CMD_SAMPLING_OPTIONS] = {
        { .type = ARG_GROUP, .help = "Generation" },
        { .type = ARG_INT,
          .name = "max-tokens",
          .key = 'n',
          .meta = "N",
          .dst = &s->max_tokens,
          .lo = 1,
          .hi = 1 << 24,
          .help = "stop after N tokens" },
        { .type = ARG_DOUBLE,
          .name = "temperature",
          .meta = "T",
          .dst = &s->temperature,
          .given = &s->has_temperature,
          .flo = 0,
          .fhi = 100,
          .none = "the checkpoint's",
          .help = "0 is greedy" },
        { .type = ARG_INT,
          .name = "top-k",
          .meta = "K",
          .dst = &s->top_k,
          .given = &s->has_top_k,
          .lo = 0,
          .hi = 1 << 24,
          .none = "the checkpoint's",
          .help = "keep the K best; 0 is off" },
        { .type = ARG_DOUBLE,
          .name = "top-p",
          .meta = "P",
          .dst = &s->top_p,
          .given = &s->has_top_p,
          .flo = 0,
          .fhi = 1,
          .none = "the checkpoint's",
          .help = "keep the shortest list with mass P; 1 is off" },
        { .type = ARG_DOUBLE,
          .name = "min-p",
          .meta = "P",
          .dst = &s->min_p,
          .given = &s->has_min_p,
          .flo = 0,
          .fhi = 1,
          .none = "the checkpoint's",
          .help = "drop what is P times less likely than the best; 0 is off" },
        { .type = ARG_DOUBLE,
          .name = "presence-penalty",
          .meta = "X",
          .dst = &s->presence,
          .given = &s->has_presence,
          .flo = -2,
          .fhi = 2,
          .none = "the checkpoint's",
          .help = "subtract X from the logit of every generated token; 0 is off" },
        { .type = ARG_DOUBLE,
          .name = "frequency-penalty",
          .meta = "X",
          .dst = &s->frequency,
          .given = &s->has_frequency,
          .flo = -2,
          .fhi = 2,
          .none = "the checkpoint's",
          .help = "subtract X for each time it was generated; 0 is off" },
        { .type = ARG_DOUBLE,
          .name = "repetition-penalty",
          .meta = "X",
          .dst = &s->repetition,
          .given = &s->has_repetition,
          .flo = 0.01,
          .fhi = 100,
          .none = "the checkpoint's",
          .help = "divide (a negative one: multiply) the logit of every token of prompt and answer by X; 1 is off" },
        { .type = ARG_LIST,
          .name = "logit-bias",
          .meta = "ID=X",
          .dst = &s->bias,
          .help = "add X, within -100 and 100, to the logit of a token id (repeatable)" },
        { .type = ARG_LIST,
          .name = "stop",
          .meta = "TEXT",
          .dst = &s->stops,
          .help = "end before this text (repeatable)" },
        { .type = ARG_LIST,
          .name = "stop-id",
          .meta = "ID",
          .dst = &s->stop_ids,
          .help = "end with this token id, besides the checkpoint's (repeatable)" },
        { .type = ARG_INT,
          .name = "min-tokens",
          .meta = "N",
          .dst = &s->min_tokens,
          .lo = 0,
          .hi = 1 << 24,
          .help = "no stop id and no stop text within the first N tokens" },
        { .type = ARG_FLAG,
          .name = "ignore-eos",
          .dst = &s->ignore_eos,
          .help = "the checkpoint's stop ids do not end the answer" },
        { .type = ARG_INT64,
          .name = "seed",
          .meta = "N",
          .dst = &s->seed,
          .given = &s->has_seed,
          .lo = 0,
          .hi = INT64_MAX,
          .none = "random",
          .help = "same request and seed, same text" },
        { .type = ARG_INT,
          .name = "spec",
          .meta = "D",
          .dst = &s->spec,
          .given = &s->has_spec,
          .lo = 0,
          .hi = ENGINE_MAX_DRAFT,
          .none = "2 with a draft head",
          .help = "drafts per round; 0 is off; the text does not depend on it" },
        { .type = ARG_INT,
          .name = "ctx",
          .meta = "N",
          .dst = &s->ctx,
          .lo = 1,
          .hi = 1 << 30,
          .none = "the model's limit, at most 32768",
          .help = "context size in tokens" },
        { .type = ARG_ENUM,
          .name = "kv",
          .dst = &s->kv,
          .choices = cmd_kv_choices,
          .help = "KV cache type; auto is fp8 when the export declares it, else f32" },
        { .type = ARG_ENUM,
          .name = "act",
          .dst = &s->act,
          .choices = cmd_act_choices,
          .help = "inputs of NVFP4 Linears; auto is as exported" },
        { .type = ARG_ENUM,
          .name = "head",
          .dst = &s->head,
          .choices = cmd_head_choices,
          .help = "how the output head is read; screened: an 8-bit copy first, the same tokens; auto: from 64 MB on" },
        { .type = ARG_STR,
          .name = "draft-head",
          .meta = "full|N",
          .dst = &s->draft_head,
          .none = "65536 of a large vocabulary",
          .help = "drafts come from an NVFP4 copy of the first N rows (and the last 512) of the head" },
        { .type = ARG_BYTES,
          .name = "memory",
          .meta = "BYTES",
          .dst = &s->memory,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "what is available",
          .help = "refuse to start when weights and caches need more" },
        { .type = ARG_FLAG,
          .name = "selftest",
          .dst = &s->selftest,
          .help = "first test that built-in prompts get the same tokens with drafts as without, in a batch as alone" },
        { .type = ARG_SET,
          .name = "think",
          .dst = &s->think,
          .value = 1,
          .help = "let the model think first (enable_thinking true)" },
        { .type = ARG_SET,
          .name = "no-think",
          .dst = &s->think,
          .value = 2,
          .help = "answer at once (enable_thinking false)" },
        { .type = ARG_STR, .name = "system", .meta = "TEXT", .dst = &s->system, .help = "system message" },
        { .type = ARG_GROUP, .help = "More" },
    };
    memcpy(o, table, sizeof table);
}

/* The checkpoint's stop ids, unless they are ignored, and the command line's. */
static bool read_stop_ids(sampler_params *p, cmd_sampling *s, const engine *g, err *e) {
    const model_config *c = &g->config;
    int own = 0;
    s->stop_values = xrealloc(s->stop_values, (size_t)(c->stop_count + s->stop_ids.n + 1) * sizeof *s->stop_values);
    for (int i = 0; i < c->stop_count && !s->ignore_eos; i++) /* padding rows of the vocabulary are never drawn */
        if (c->stop_ids[i] < g->n.real_vocab) s->stop_values[own++] = c->stop_ids[i];
    for (int i = 0; i < s->stop_ids.n; i++) {
        int64_t id;
        if (!args_int(&id, s->stop_ids.v[i]) || id < 0 || id > INT32_MAX)
            return fail(e, ERR_USAGE, "E-USAGE", "--stop-id: '%s' is not a token id", s->stop_ids.v[i]);
        s->stop_values[own + i] = (int32_t)id;
    }
    p->stop_ids = s->stop_values;
    p->n_stop_ids = own + s->stop_ids.n;
    return true;
}

static bool read_bias(sampler_params *p, cmd_sampling *s, err *e) {
    s->bias_values = xrealloc(s->bias_values, (size_t)(s->bias.n + 1) * sizeof *s->bias_values);
    for (int i = 0; i < s->bias.n; i++) {
        const char *text = s->bias.v[i], *equals = strchr(text, '=');
        char id_text[24];
        int64_t id;
        double value;
        if (!equals || snprintf(id_text, sizeof id_text, "%.*s", (int)(equals - text), text) >= (int)sizeof id_text ||
            !args_int(&id, id_text) || id < 0 || id > INT32_MAX || !args_double(&value, equals + 1))
            return fail(e, ERR_USAGE, "E-USAGE", "--logit-bias: '%s' is not ID=X", text);
        s->bias_values[i] = (sampler_bias){ (int32_t)id, (float)value };
    }
    p->bias = s->bias_values;
    p->n_bias = s->bias.n;
    return true;
}

/* What generation_config.json says, then what the command line says. */
static void merge(sampler_params *p, const cmd_sampling *s, const model_config *c) {
    if (c->gen.has_temperature) p->temperature = c->gen.temperature;
    if (!c->gen.do_sample) p->temperature = 0;
    if (c->gen.has_top_k) p->top_k = c->gen.top_k;
    if (c->gen.has_top_p) p->top_p = c->gen.top_p;
    if (c->gen.has_min_p) p->min_p = c->gen.min_p;
    if (c->gen.has_presence) p->presence = c->gen.presence;
    if (c->gen.has_frequency) p->frequency = c->gen.frequency;
    if (c->gen.has_repetition) p->repetition = c->gen.repetition;
    if (s->has_temperature) p->temperature = s->temperature;
    if (s->has_top_k) p->top_k = s->top_k;
    if (s->has_top_p) p->top_p = s->top_p;
    if (s->has_min_p) p->min_p = s->min_p;
    if (s->has_presence) p->presence = s->presence;
    if (s->has_frequency) p->frequency = s->frequency;
    if (s->has_repetition) p->repetition = s->repetition;
}

bool cmd_sampler(sampler_params *out, cmd_sampling *s, const engine *g, err *e) {
    sampler_params p = { .temperature = 1, .top_p = 1, .repetition = 1, .min_tokens = s->min_tokens };
    merge(&p, s, &g->config);
    if (!read_stop_ids(&p, s, g, e) || !read_bias(&p, s, e) || !sampler_check(&p, g->n.real_vocab, e)) return false;
    if (p.presence + p.frequency > 1.5)
        log_say("W-SAMPLE-PENALTIES", "presence %g and frequency %g penalty together: long answers lose their grammar",
                p.presence, p.frequency);
    p.seed = (uint64_t)s->seed;
    if (!s->has_seed && !sampler_is_greedy(&p)) {
        uint32_t r = 0;
        if (getrandom(&r, sizeof r, 0) != (ssize_t)sizeof r) r = (uint32_t)getpid();
        p.seed = r;
    }
    *out = p;
    return true;
}

void cmd_sampling_free(cmd_sampling *s) {
    arg_strings_free(&s->stops);
    arg_strings_free(&s->bias);
    arg_strings_free(&s->stop_ids);
    free(s->bias_values);
    free(s->stop_values);
}

bool cmd_draft_head(int *out, const char *text, err *e) {
    int64_t rows = DRAFT_HEAD_AUTO;
    if (text && strcmp(text, "full") == 0)
        rows = DRAFT_HEAD_FULL;
    else if (text && (!args_int(&rows, text) || rows < 1 || rows > INT32_MAX / 2))
        return fail(e, ERR_USAGE, "E-USAGE", "--draft-head: '%.40s' is neither full nor a number of rows", text);
    *out = (int)rows;
    return true;
}

void cmd_prefix_memory(engine_options *o, int64_t bytes) {
    o->prefix_kv_bytes = bytes * 2 / 5;
    o->prefix_state_bytes = bytes - o->prefix_kv_bytes;
}

bool cmd_open_engine(engine **out, const char *dir, const cmd_sampling *s, bool need_text, int64_t prefix_bytes,
                     err *e) {
    int rows;
    if (!cmd_draft_head(&rows, s->draft_head, e)) return false;
    engine_options o = { .ops = cmd_ops_options(),
                         .ctx = s->ctx,
                         .slots = s->selftest ? 2 : 1, /* one beside another is a batch */
                         .kv = (kv_mode)s->kv,
                         .act = (act_mode)s->act,
                         .heads = { .mode = (head_mode)s->head, .draft_rows = rows },
                         .memory_bytes = s->memory,
                         .need_text = need_text };
    cmd_prefix_memory(&o, prefix_bytes);
    bool ok = engine_open(out, dir, &o, e);
    if (!ok && prefix_bytes > 0 && strcmp(e->id, "E-MACHINE-PLAN") == 0) {
        *e = (err){ 0 };
        cmd_prefix_memory(&o, 0);
        ok = engine_open(out, dir, &o, e);
    }
    if (!ok) return false;
    char plan[500];
    memory_plan_text(plan, sizeof plan, &(*out)->plan);
    if (log_level() > 1) log_say("N-ENGINE-MEMORY", "%s: %s", dir, plan);
    return true;
}
