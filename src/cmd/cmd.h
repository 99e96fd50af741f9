/* cmd.h - what the subcommands share: the table, common options, the embedded model. One short file per command:
 * options in, report out. Only here and in main.c does nibble print results or exit. */
#ifndef NIBBLE_CMD_H
#define NIBBLE_CMD_H

#include "base/args.h"
#include "base/err.h"
#include "engine/engine.h"

/* argv[0] is the command's name. Returns the exit code when it ran (0, 1 or 130); on failure fills e. */
typedef int cmd_fn(int argc, char **argv, err *e);

cmd_fn cmd_run, cmd_chat, cmd_logits, cmd_inspect, cmd_quantize, cmd_requant_mtp, cmd_tokenize, cmd_detokenize,
    cmd_render, cmd_bench, cmd_serve, cmd_eval, cmd_trace, cmd_check, cmd_selftest;

/* Options every command has. Read them with cmd_common() after cmd_parse. */
typedef struct cmd_options {
    int threads; /* 0 = all */
    int isa;     /* index into the --isa choices; see cmd_ops_options */
    int device;
    const char *experts; /* --experts as given, or NULL */
    layer_set cpu_experts;
    bool quiet, json;
    int verbose;
} cmd_options;
cmd_options *cmd_common(void);

/* Parse with the common options behind the command's own; prints --help and sets *done. Sets the log level. */
NODISCARD bool cmd_parse(const arg_spec *spec, int argc, char **argv, arg_strings *pos, bool *done, err *e);
ops_options cmd_ops_options(void);

/* pos[index], or the embedded model, which is named on stderr. Never NULL on success; valid until exit.
 * Errors: E-CMD-MODEL (no argument and no embedded model found). */
NODISCARD bool cmd_model_dir(const char **out, const arg_strings *pos, int index, err *e);

/* 0 until the first SIGINT, then 1; installed by the first call. A second SIGINT ends the process (exit 130). */
volatile const int *cmd_interrupt(void);
/* The same for SIGTERM too, for commands of several steps: later calls do not take an interruption back. */
volatile const int *cmd_interrupt_all(void);

/* Sampling options shared by run and chat; negative or unset = as the checkpoint's generation_config.json says. */
typedef struct cmd_sampling {
    double temperature, top_p, min_p, presence, frequency, repetition;
    int top_k, spec, max_tokens, min_tokens, ctx, kv, act, think, head;
    int64_t seed, memory;
    const char *system, *draft_head;
    arg_strings stops, bias, stop_ids; /* as given */
    bool has_temperature, has_top_p, has_min_p, has_top_k, has_spec, has_seed, ignore_eos;
    bool has_presence, has_frequency, has_repetition, selftest;
    sampler_bias *bias_values; /* what cmd_sampler made of bias and stop_ids */
    int32_t *stop_values;
} cmd_sampling;
enum { CMD_SAMPLING_OPTIONS = 27 };
/* Fill opts[CMD_SAMPLING_OPTIONS] for `s` and set s to its defaults. */
void cmd_sampling_options(arg_opt *opts, cmd_sampling *s);
/* Merge with the checkpoint's defaults; draws a seed when none is given. *out borrows from s until cmd_sampling_free; its
 * stop ids are all that end a generation. Errors: E-USAGE (a bias or stop id that is none), E-SAMPLE-PARAM. Says:
 * W-SAMPLE-PENALTIES. */
NODISCARD bool cmd_sampler(sampler_params *out, cmd_sampling *s, const engine *g, err *e);
void cmd_sampling_free(cmd_sampling *s);
/* Choices of --kv, --act and --head (indices are kv_mode, act_mode, head_mode); the rows --draft-head asks for. */
extern const char *const cmd_kv_choices[], *const cmd_act_choices[], *const cmd_head_choices[];
NODISCARD bool cmd_draft_head(int *out, const char *text, err *e);
/* Memory of a loop's prefix cache: three fifths for states and two for KV. A state of the 35B model is as large as the KV of
 * 6,144 tokens. */
void cmd_prefix_memory(engine_options *o, int64_t bytes);
/* prefix_bytes: for a loop's prefix cache; when the memory plan refuses it, it is done without. */
NODISCARD bool cmd_open_engine(engine **out, const char *dir, const cmd_sampling *s, bool need_text,
                               int64_t prefix_bytes, err *e);

#endif
