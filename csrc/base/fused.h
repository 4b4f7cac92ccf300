/* fused.h - a * b + c rounded once; no other file calls the C library's fmaf or fma.
 *
 * The fmaf of several C libraries (musl, those of Windows and WebAssembly) is software that rounds
 * a subnormal result twice, so it differs from the instruction.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The processor's instruction, in a function compiled for an instruction set that has it. A
 * macro, so that builds without optimisation inline it too. */
#define qsf_fmaf_by_instruction(a, b, c) __builtin_fmaf(a, b, c)

/* The product of two floats is exact in binary64. The sum is rounded to odd: if it is inexact, its
 * last bit is set, so the final rounding to 24 or fewer bits sees on which side of a tie it is. */
static inline float qsf_fmaf_in_double(float a, float b, float c)
{
    const double product = (double)a * (double)b;
    double sum = product + (double)c;
    const double added = sum - product;
    const double error = (product - (sum - added)) + ((double)c - added);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if ((error > 0.0 || error < 0.0) && (bits & 1) == 0) { /* NaN after an infinity */
        bits = (error > 0.0) == (sum > 0.0) ? bits + 1 : bits - 1;
        memcpy(&sum, &bits, sizeof sum);
    }
    return (float)sum;
}

static inline float qsf_fmaf(float a, float b, float c)
{
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__riscv_flen) || defined(__GLIBC__)
    return fmaf(a, b, c); /* glibc uses the instruction if the processor has it, and is exact */
#else
    return qsf_fmaf_in_double(a, b, c);
#endif
}

/* The libraries' fma for binary64 is exact: check_base compares. */
static inline double qsf_fma(double a, double b, double c)
{
    return fma(a, b, c);
}
