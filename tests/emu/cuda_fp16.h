/* cuda_fp16.h - see cuda_runtime.h beside it. */
#pragma once
typedef _Float16 __half;
static inline float __half2float(__half h) { return (float)h; }
