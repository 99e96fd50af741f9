/* fuzz_config.c - config_read over arbitrary JSON. The input is config.json; a member "generation" of it, if any, serves
 * as generation_config.json. What is accepted must keep the bounds that the rest of the program relies on. */
#include <math.h>

#include "base/log.h"
#include "model/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static void silent(void *ctx, const char *id, const char *line) { (void)ctx, (void)id, (void)line; }

static void check(const model_config *c) {
    CHECK(c->vocab > 0 && c->hidden > 0 && c->layers > 0 && c->layers <= CONFIG_MAX_LAYERS, "widths");
    CHECK(c->attn_layers + c->gdn_layers == c->layers, "layers");
    CHECK(c->heads % c->kv_heads == 0 && c->lin_v_heads % c->lin_k_heads == 0, "heads");
    CHECK(c->rotary_dim >= 2 && c->rotary_dim % 2 == 0 && c->rotary_dim <= c->head_dim &&
              c->rotary_dim / 2 <= CONFIG_MAX_ROPE,
          "rotary");
    for (int i = 0; i < c->rotary_dim / 2; i++)
        CHECK(isfinite(c->inv_freq[i]) && c->inv_freq[i] >= 0 && c->inv_freq[i] <= 1 && c->rope_axis[i] < 3,
              "frequency %d", i);
    CHECK(isfinite(c->rope_scaling) && c->rope_scaling > 0 && c->rms_eps > 0, "scales");
    CHECK(c->is_moe ? c->topk > 0 && c->topk <= c->experts && !c->inter : !c->experts && c->inter > 0, "ffn");
    CHECK(c->stop_count >= 0 && c->stop_count <= CONFIG_MAX_STOPS, "stops");
    for (int i = 0; i < c->stop_count; i++) CHECK(c->stop_ids[i] >= 0 && c->stop_ids[i] < c->vocab, "stop %d", i);
    CHECK(c->max_position > 0 && c->max_position <= 1 << 24, "context");
    CHECK(config_state_bytes(c) >= 0 && config_kv_bytes_per_token(c, 4, true) > 0, "sizes");
    CHECK(c->mtp_layers == 0 || c->mtp_layers == 1, "draft head");
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n) {
    arena mem = { .limit = 64 << 20 };
    const json *v;
    err e = { 0 };
    static model_config c;
    log_set_sink(silent, NULL);
    const json_limits limits = { .max_bytes = 1 << 20, .allow_duplicates = true };
    if (json_parse(&v, &mem, (str){ (const char *)p, n }, "config.json", &limits, &e)) {
        if (config_read(&c, v, json_get(v, "generation"), "DIR", &e))
            check(&c);
        else
            CHECK(e.kind == ERR_INPUT && e.id && e.msg[0], "a failure without a reason");
    }
    arena_free(&mem);
    return 0;
}
