/* selftest.h - before a backend computes anything: do the selected kernels return the reference's bits on this CPU?
 *
 * Three shapes (one row, a few rows, many rows with tails) through every kernel that decides an answer; under a
 * millisecond. A miscompiled kernel, a CPU with a fault or an emulator with one shows here, not in an answer. */
#ifndef NIBBLE_SELFTEST_H
#define NIBBLE_SELFTEST_H

#include "base/err.h"
#include "kern/nv.h"
#include "kern/quant.h"

/* Error: E-MACHINE-KERNEL (names level, kernel and shape). */
NODISCARD bool kern_selftest(const kern *k, const quant_kern *q, const nv_kern *nv, err *e);

#endif
