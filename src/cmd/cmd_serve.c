/* nibble serve: the model behind an HTTP API. */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "cmd/cmd.h"
#include "serve/server.h"

enum { SERVE_CHUNK = 256 }; /* half of the engine's: who decodes waits for the pass of another's prompt */

typedef struct options {
    cmd_sampling s;
    serve_options o;
    int max_seqs, chunk, queue, log_format;
    int64_t max_body, kv_memory, prefix_cache, cache_dir_bytes;
    const char *cache_dir;
    arg_strings key_files, names;
    buf key_text; /* keys from files and the environment, NUL behind each */
} options;

static const char *const log_choices[] = { "json", "off", NULL };

/* One key a line; blank lines and lines starting with # do not count. */
static bool read_key_file(options *o, const char *path, err *e) {
    buf text = { 0 };
    if (!file_read(&text, path, 1 << 20, e)) return buf_free(&text), false;
    for (char *save = NULL, *line = text.n ? strtok_r(text.p, "\r\n", &save) : NULL; line;
         line = strtok_r(NULL, "\r\n", &save))
        if (line[0] != '#') buf_add(&o->key_text, line, strlen(line) + 1);
    buf_free(&text);
    return true;
}

static bool read_keys(options *o, err *e) {
    const char *env = getenv("NIBBLE_API_KEY");
    if (env && *env) buf_add(&o->key_text, env, strlen(env) + 1);
    for (int i = 0; i < o->key_files.n; i++)
        if (!read_key_file(o, o->key_files.v[i], e)) return false;
    for (size_t at = 0; at < o->key_text.n; at += strlen(o->key_text.p + at) + 1)
        arg_strings_add(&o->o.api_keys, o->key_text.p + at);
    for (int i = 0; i < o->o.api_keys.n; i++)
        if (o->o.api_keys.v[i][0] == 0) return fail(e, ERR_USAGE, "E-USAGE", "--api-key: a key must not be empty");
    if (o->key_files.n && o->o.api_keys.n == 0)
        return fail(e, ERR_USAGE, "E-USAGE", "--api-key-file: no key in %s", o->key_files.v[0]);
    return true;
}

static bool defaults(void *ctx, sampler_params *out, const engine *g, err *e) {
    options *o = ctx;
    return cmd_sampler(out, &o->s, g, e);
}

static bool serve(options *o, const char *dir, int *code, err *e) {
    int rows;
    if (!cmd_draft_head(&rows, o->s.draft_head, e) || !read_keys(o, e)) return false;
    if ((o->cache_dir || o->cache_dir_bytes) && o->prefix_cache == 0)
        return fail(e, ERR_USAGE, "E-USAGE",
                    "--cache-dir: needs a prefix cache in memory (leave out --prefix-cache 0)");
    if (o->cache_dir_bytes && !o->cache_dir)
        return fail(e, ERR_USAGE, "E-USAGE", "--cache-dir-size: of which folder? (name it with --cache-dir)");
    serve_options *so = &o->o;
    const int64_t prefix = o->prefix_cache >= 0 ? o->prefix_cache : min_i64(memory_available() / 8, (int64_t)1 << 30);
    so->dir = dir;
    if (o->names.n) so->name = o->names.v[0];
    for (int i = 1; i < o->names.n; i++) arg_strings_add(&so->aliases, o->names.v[i]);
    so->engine = (engine_options){ .ops = cmd_ops_options(),
                                   .ctx = o->s.ctx,
                                   .slots = o->max_seqs,
                                   .chunk = o->chunk ? o->chunk : SERVE_CHUNK,
                                   .kv = (kv_mode)o->s.kv,
                                   .act = (act_mode)o->s.act,
                                   .heads = { .mode = (head_mode)o->s.head, .draft_rows = rows },
                                   .kv_bytes = o->kv_memory,
                                   .memory_bytes = o->s.memory,
                                   .need_text = true };
    cmd_prefix_memory(&so->engine, prefix);
    so->loop = (loop_options){ .depth = o->s.has_spec ? o->s.spec : 2,
                               .max_queue = o->queue,
                               .prefix_dir = o->cache_dir,
                               .prefix_dir_bytes = o->cache_dir_bytes };
    so->limits.max_body_bytes = (size_t)o->max_body;
    so->selftest = o->s.selftest;
    so->thinking = o->s.think == 0 ? -1 : o->s.think == 1;
    if (!so->access_log) so->access_log = "-";
    if (o->log_format == 1) so->access_log = NULL;
    so->defaults = defaults;
    so->ctx = o;
    return server_run(so, code, e);
}

int cmd_serve(int argc, char **argv, err *e) {
    options o = { .s = { .top_p = 1, .repetition = 1 },
                  .o = { .host = "127.0.0.1",
                         .port = 8000,
                         .limits = { .max_header_bytes = 64 << 10,
                                     .max_backlog_bytes = 256 << 10,
                                     .max_connections = 1000,
                                     .header_seconds = 30,
                                     .idle_seconds = 120,
                                     .write_seconds = 60 },
                         .max_preparing = 256,
                         .version = NIBBLE_VERSION,
                         .commit = NIBBLE_COMMIT },
                  .max_seqs = 8,
                  .queue = 256,
                  .max_body = 16 << 20,
                  .prefix_cache = -1 };
    const arg_opt opts[] = {
        { .type = ARG_GROUP, .help = "Server" },
        { .type = ARG_STR, .name = "host", .meta = "ADDR", .dst = &o.o.host, .help = "address to listen on" },
        { .type = ARG_INT,
          .name = "port",
          .key = 'p',
          .meta = "N",
          .dst = &o.o.port,
          .lo = 0,
          .hi = 65535,
          .help = "port to listen on; 0 takes a free one" },
        { .type = ARG_LIST,
          .name = "alias",
          .meta = "NAME",
          .dst = &o.names,
          .help = "name of the model in the API instead of its folder's; further ones answer too (repeatable)" },
        { .type = ARG_LIST,
          .name = "api-key",
          .meta = "KEY",
          .dst = &o.o.api_keys,
          .help = "clients must send this key (repeatable; also from the environment: NIBBLE_API_KEY)" },
        { .type = ARG_LIST,
          .name = "api-key-file",
          .meta = "FILE",
          .dst = &o.key_files,
          .help = "keys from a file, one a line (repeatable)" },
        { .type = ARG_LIST,
          .name = "cors",
          .meta = "ORIGIN",
          .dst = &o.o.cors,
          .help = "web pages of this origin may call the server; * is all (repeatable)" },
        { .type = ARG_ENUM,
          .name = "log-format",
          .dst = &o.log_format,
          .choices = log_choices,
          .help = "one line per request, or none" },
        { .type = ARG_STR,
          .name = "access-log",
          .meta = "FILE",
          .dst = &o.o.access_log,
          .none = "standard error",
          .help = "where these lines go; opened again on SIGHUP" },
        { .type = ARG_FLAG, .name = "log-prompts", .dst = &o.o.log_prompts, .help = "the lines hold the prompts too" },
        { .type = ARG_GROUP, .help = "Limits" },
        { .type = ARG_INT,
          .name = "max-seqs",
          .meta = "N",
          .dst = &o.max_seqs,
          .lo = 1,
          .hi = 4096,
          .help = "answers generated at the same time" },
        { .type = ARG_INT,
          .name = "max-queue",
          .meta = "N",
          .dst = &o.queue,
          .lo = 1,
          .hi = 1 << 20,
          .help = "answers that may wait; beyond that clients get 429" },
        { .type = ARG_BYTES,
          .name = "max-body",
          .meta = "BYTES",
          .dst = &o.max_body,
          .lo = 1024,
          .hi = 1 << 30,
          .help = "largest request body" },
        { .type = ARG_INT,
          .name = "max-connections",
          .meta = "N",
          .dst = &o.o.limits.max_connections,
          .lo = 1,
          .hi = 1 << 20,
          .help = "open connections; further ones wait to be accepted" },
        { .type = ARG_DOUBLE,
          .name = "timeout",
          .meta = "SECONDS",
          .dst = &o.o.deadline_seconds,
          .lo = 0,
          .flo = 0,
          .fhi = 1e9,
          .none = "none",
          .help = "an answer that takes longer is cut there" },
        { .type = ARG_DOUBLE,
          .name = "write-timeout",
          .meta = "SECONDS",
          .dst = &o.o.limits.write_seconds,
          .flo = 1,
          .fhi = 1e6,
          .help = "a client that reads nothing for so long is cut off" },
        { .type = ARG_DOUBLE,
          .name = "drain",
          .meta = "SECONDS",
          .dst = &o.o.drain_seconds,
          .flo = 0,
          .fhi = 1e6,
          .none = "until all have finished",
          .help = "how long running answers may go on after SIGTERM" },
        { .type = ARG_GROUP, .help = "Model" },
        { .type = ARG_INT,
          .name = "ctx",
          .meta = "N",
          .dst = &o.s.ctx,
          .lo = 1,
          .hi = 1 << 30,
          .none = "the model's limit, at most 32768",
          .help = "context size in tokens" },
        { .type = ARG_INT,
          .name = "spec",
          .meta = "D",
          .dst = &o.s.spec,
          .given = &o.s.has_spec,
          .lo = 0,
          .hi = ENGINE_MAX_DRAFT,
          .none = "2 with a draft head",
          .help = "most drafts per round; 0 is off; the text does not depend on it" },
        { .type = ARG_INT,
          .name = "chunk",
          .meta = "N",
          .dst = &o.chunk,
          .lo = 0,
          .hi = 1 << 16,
          .none = "256",
          .help = "prompt rows per pass" },
        { .type = ARG_ENUM,
          .name = "kv",
          .dst = &o.s.kv,
          .choices = cmd_kv_choices,
          .help = "KV cache type; auto is fp8 when the export declares it, else f32" },
        { .type = ARG_ENUM,
          .name = "act",
          .dst = &o.s.act,
          .choices = cmd_act_choices,
          .help = "inputs of NVFP4 Linears; auto is as exported" },
        { .type = ARG_ENUM,
          .name = "head",
          .dst = &o.s.head,
          .choices = cmd_head_choices,
          .help = "how the output head is read; screened: an 8-bit copy first, the same tokens; auto: from 64 MB on" },
        { .type = ARG_STR,
          .name = "draft-head",
          .meta = "full|N",
          .dst = &o.s.draft_head,
          .none = "65536 of a large vocabulary",
          .help = "drafts come from an NVFP4 copy of the first N rows (and the last 512) of the head" },
        { .type = ARG_BYTES,
          .name = "prefix-cache",
          .meta = "BYTES",
          .dst = &o.prefix_cache,
          .lo = 0,
          .hi = INT64_MAX,
          .none = "1 GiB, at most an eighth of what is available",
          .help = "memory for what prompts have in common with earlier ones; 0 is off" },
        { .type = ARG_STR,
          .name = "cache-dir",
          .meta = "DIR",
          .dst = &o.cache_dir,
          .help = "keep there what the prefix cache has no room for, and all of it between runs" },
        { .type = ARG_BYTES,
          .name = "cache-dir-size",
          .meta = "BYTES",
          .dst = &o.cache_dir_bytes,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "16 GB",
          .help = "the most that the files in --cache-dir take" },
        { .type = ARG_BYTES,
          .name = "kv-memory",
          .meta = "BYTES",
          .dst = &o.kv_memory,
          .lo = 0,
          .hi = INT64_MAX,
          .none = "full contexts for all",
          .help = "KV cache shared by all running answers; when it is short, one waits" },
        { .type = ARG_BYTES,
          .name = "memory",
          .meta = "BYTES",
          .dst = &o.s.memory,
          .lo = 1,
          .hi = INT64_MAX,
          .none = "what is available",
          .help = "refuse to start when weights and caches need more" },
        { .type = ARG_FLAG,
          .name = "selftest",
          .dst = &o.s.selftest,
          .help = "a longer self-test before the first request: more tokens, and alone as in a batch" },
        { .type = ARG_GROUP, .help = "Defaults of requests" },
        { .type = ARG_DOUBLE,
          .name = "temperature",
          .meta = "T",
          .dst = &o.s.temperature,
          .given = &o.s.has_temperature,
          .flo = 0,
          .fhi = 100,
          .none = "the checkpoint's",
          .help = "0 is greedy" },
        { .type = ARG_INT,
          .name = "top-k",
          .meta = "K",
          .dst = &o.s.top_k,
          .given = &o.s.has_top_k,
          .lo = 0,
          .hi = 1 << 24,
          .none = "the checkpoint's",
          .help = "keep the K best; 0 is off" },
        { .type = ARG_DOUBLE,
          .name = "top-p",
          .meta = "P",
          .dst = &o.s.top_p,
          .given = &o.s.has_top_p,
          .flo = 0,
          .fhi = 1,
          .none = "the checkpoint's",
          .help = "keep the shortest list with mass P; 1 is off" },
        { .type = ARG_DOUBLE,
          .name = "min-p",
          .meta = "P",
          .dst = &o.s.min_p,
          .given = &o.s.has_min_p,
          .flo = 0,
          .fhi = 1,
          .none = "the checkpoint's",
          .help = "drop what is P times less likely than the best; 0 is off" },
        { .type = ARG_DOUBLE,
          .name = "presence-penalty",
          .meta = "X",
          .dst = &o.s.presence,
          .given = &o.s.has_presence,
          .flo = -2,
          .fhi = 2,
          .none = "the checkpoint's",
          .help = "subtract X from the logit of every generated token; 0 is off" },
        { .type = ARG_SET, .name = "think", .dst = &o.s.think, .value = 1, .help = "let the model think first" },
        { .type = ARG_SET, .name = "no-think", .dst = &o.s.think, .value = 2, .help = "answer at once" },
    };
    const arg_spec spec = { .usage = "serve [options] [MODEL_DIR]",
                            .about =
                                "Serve a model over HTTP: the OpenAI API at /v1, a web page at /. Ends on SIGTERM or "
                                "SIGINT when running answers are done; docs/SERVING.md is the reference.",
                            .opts = opts,
                            .count = ARRAY_LEN(opts),
                            .max_positional = 1,
                            .examples =
                                "  nibble serve\n"
                                "  nibble serve Qwen3.6-35B-A3B-NVFP4 --max-seqs 16 --api-key-file keys.txt --host "
                                "0.0.0.0\n"
                                "  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: "
                                "application/json' \\\n"
                                "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'\n" };
    arg_strings pos = { 0 };
    bool done;
    const char *dir;
    int code = 0;
    if (cmd_parse(&spec, argc, argv, &pos, &done, e) && !done && cmd_model_dir(&dir, &pos, 0, e) &&
        !serve(&o, dir, &code, e))
        code = 0;
    arg_strings *lists[] = { &pos, &o.key_files, &o.names, &o.o.aliases, &o.o.api_keys, &o.o.cors };
    for (size_t i = 0; i < ARRAY_LEN(lists); i++) arg_strings_free(lists[i]);
    buf_free(&o.key_text);
    cmd_sampling_free(&o.s);
    return code;
}
