/* export.h - the tiny model as ModelOpt exports it: uniform NVFP4, FP8 KV, BF16 draft head, the oracle's maxima. */
#ifndef NIBBLE_TEST_EXPORT_H
#define NIBBLE_TEST_EXPORT_H

#include "quant/configs.h"
#include "quant/quantize.h"

#include "support.h"

/* dir must not exist yet. `source` is a checkpoint folder, `amax` its maxima. */
static inline void export_model(const char *dir, const char *source, const recipe *how, const amax_table *amax) {
    err e = { 0 };
    ckpt files;
    model_config config;
    weights w;
    plan p;
    quantize_result r;
    char *partial;
    const provenance from = { .calibration = "oracle", .mtp_scales = "", .arith = "cuda", .algorithm = "max" };
    OK(ckpt_open(&files, source, &e));
    OK(config_read(&config, files.config, files.generation, source, &e));
    OK(weights_bind(&w, &files, &config, &e));
    OK(plan_make(&p, &files, &config, how, 10000000000u, &e));
    const quantize_options o = { .arith = ARITH_CUDA, .amax = amax, .threads = 1, .isa = ISA_COUNT, .ranks = 1 };
    OK(quantize_shards(&r, &partial, &p, dir, &o, &e));
    OK(configs_write(partial, &p, &from, &e));
    OK(quantize_commit(partial, dir, &e));
    free(partial);
    quantize_result_free(&r);
    plan_free(&p);
    weights_free(&w);
    ckpt_close(&files);
}

/* Run from the repository's root. */
static inline void export_tiny(const char *dir) {
    err e = { 0 };
    amax_table amax;
    const recipe uniform = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_BF16 };
    OK(amax_load(&amax, ORACLE "nvfp4/modelopt-cuda/amax.safetensors", &e));
    export_model(dir, TINY, &uniform, &amax);
    amax_free(&amax);
}

#endif
