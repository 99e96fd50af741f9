/* mathf.h - the elementary functions of the arithmetic contract (docs/NUMERICS.md 1).
 *
 * Scalar reference versions; kern/ holds vector versions with the same bits. Built from IEEE +, -, *, /, sqrt and
 * fused multiply-add only, so every ISA and every GPU can return the same float32. NaN in, NaN out
 * (payload and sign unspecified). No global rounding-mode changes are supported. */
#ifndef NIBBLE_MATHF_H
#define NIBBLE_MATHF_H

#include <stdint.h>

float num_exp(float x);      /* <= 1 ulp; 0 below the subnormal range, inf above; exact at 0, +-inf */
float num_log1p(float x);    /* <= 2 ulp for x >= 0 */
float num_sigmoid(float x);  /* fl(1 / fl(1 + exp(-x))) */
float num_silu(float x);     /* fl(x / fl(1 + exp(-x))); 0 (sign of x) at -inf is specified: see NUMERICS 1 */
float num_softplus(float x); /* x > 20 ? x : log1p(exp(x)) */
/* sin and cos of a double angle |x| <= 2^31, each rounded once to float32 from a double result that is the same
 * on every machine (no libm). */
void num_sincos(double x, float *sin_out, float *cos_out);
/* Natural logarithm of a normal double > 0, within 2 ulp; IEEE + - * / only, the same double on every machine. inf at
 * inf, NaN for everything else. */
double num_log(double x);

#endif
