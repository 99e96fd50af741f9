/* export.h - the tiny model as ModelOpt exports it: uniform NVFP4, FP8 KV, BF16 draft head, the oracle's maxima. */
#ifndef NIBBLE_TEST_EXPORT_H
#define NIBBLE_TEST_EXPORT_H

#include "quant/configs.h"
#include "quant/quantize.h"

#include "support.h"

/* dir must not exist yet. Run from the repository's root. */
static inline void export_tiny(const char *dir) {
    err e = { 0 };
    ckpt files;
    model_config config;
    weights w;
    plan p;
    quantize_result r;
    amax_table amax;
    char *partial;
    const recipe uniform = { .preset = RECIPE_NVFP4, .kv = KV_FP8, .mtp = MTP_BF16 };
    const provenance from = { .calibration = "oracle", .mtp_scales = "", .arith = "cuda", .algorithm = "max" };
    OK(amax_load(&amax, ORACLE "nvfp4/modelopt-cuda/amax.safetensors", &e));
    OK(ckpt_open(&files, TINY, &e));
    OK(config_read(&config, files.config, files.generation, TINY, &e));
    OK(weights_bind(&w, &files, &config, &e));
    OK(plan_make(&p, &files, &config, &uniform, 10000000000u, &e));
    const quantize_options o = { .arith = ARITH_CUDA, .amax = &amax, .threads = 1, .isa = ISA_COUNT, .ranks = 1 };
    OK(quantize_shards(&r, &partial, &p, dir, &o, &e));
    OK(configs_write(partial, &p, &from, &e));
    OK(quantize_commit(partial, dir, &e));
    free(partial);
    quantize_result_free(&r);
    amax_free(&amax);
    plan_free(&p);
    weights_free(&w);
    ckpt_close(&files);
}

#endif
