/* main.c - finds the command, prints its failure, sets the exit code. */
#include <stdio.h>
#include <string.h>

#include "base/args.h"
#include "base/bus.h"
#include "cmd/cmd.h"
#include "quant/dist.h"

static const struct command {
    const char *name, *about;
    cmd_fn *run;
} commands[] = {
    { "run", "answer one prompt", cmd_run },
    { "chat", "talk to the model", cmd_chat },
    { "serve", "the model behind an OpenAI-compatible HTTP API", cmd_serve },
    { "logits", "logits and hidden states of given token ids, as safetensors", cmd_logits },
    { "inspect", "what a checkpoint holds: shape, bytes, formats, caches", cmd_inspect },
    { "quantize", "write an NVFP4 checkpoint", cmd_quantize },
    { "requant-mtp", "add, replace or take out the draft head of an export", cmd_requant_mtp },
    { "check", "is a checkpoint sound, and what it was made from", cmd_check },
    { "tokenize", "text to token ids", cmd_tokenize },
    { "detokenize", "token ids to text", cmd_detokenize },
    { "eval", "with error bars: KL, word problems, accept length, A/B, load, model card", cmd_eval },
    { "trace", "every op of one pass: magnitude, NaN and Inf, distance from a reference", cmd_trace },
    { "selftest", "does a device return the bits of the CPU", cmd_selftest },
    { "bench", "speed beside what the memory allows", cmd_bench },
    { "render", "what the chat template makes of a request", cmd_render },
};

static void help(FILE *to) {
    fputs("nibble - Qwen3.5/3.6 models, exactly and fast\n\nusage: nibble COMMAND [options] [MODEL_DIR]\n\n", to);
    for (size_t i = 0; i < ARRAY_LEN(commands); i++) fprintf(to, "  %-12s %s\n", commands[i].name, commands[i].about);
    fputs("\nWithout MODEL_DIR the embedded model (qwen36-tiny) is used. `nibble COMMAND --help` says more.\n"
          "\nexamples:\n  nibble run -p \"Tell me a short story.\"\n  nibble chat\n  nibble inspect --json\n",
          to);
}

static int usage_error(const char *word, err *e) {
    const char *names[ARRAY_LEN(commands)];
    for (size_t i = 0; i < ARRAY_LEN(commands); i++) names[i] = commands[i].name;
    const char *near = args_nearest(word, names, (int)ARRAY_LEN(commands));
    fail(e, ERR_USAGE, "E-USAGE", "%s: no such command%s%s%s (nibble --help lists them)", word,
         near ? "; did you mean `" : "", near ? near : "", near ? "`?" : "");
    return 2;
}

static int dispatch(int argc, char **argv, err *e) {
    if (argc < 2) {
        help(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--version") == 0)
        return printf("nibble %s (%s), %s\n", NIBBLE_VERSION, NIBBLE_COMMIT, dist_build()), 0;
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0)
        return help(stdout), 0;
    for (size_t i = 0; i < ARRAY_LEN(commands); i++)
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1, e);
    return usage_error(argv[1], e);
}

int main(int argc, char **argv) {
    err e = { 0 };
    bus_catch();
    const int code = dispatch(argc, argv, &e);
    /* A result that did not reach its file or pipe is not a result. */
    if (fflush(stdout) != 0)
        fail(&e, ERR_MACHINE, "E-CMD-STDOUT",
             "standard output: the result could not be written (full disk or closed pipe?)");
    if (e.kind != ERR_NONE) fprintf(stderr, "nibble: %s: %s\n", e.id, e.msg);
    return e.kind != ERR_NONE ? err_exit_code(e.kind) : code;
}
