/* vecops.h - the vector operations and attention of each instruction set, for the fill functions.
 *
 * One body (exp_tmpl.h, vecops_tmpl.h, recur_tmpl.h, kv_tmpl.h, values_tmpl.h, attend_tmpl.h) is
 * compiled per set over the lane operations of lanes_*.h, so all sets are bit-identical by
 * construction. Only AVX-512 rounds activations by a body of its own (quantise_avx512.h).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <float.h> /* the templates need these outside of any target region */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/bytes.h"
#include "base/fused.h"
#include "base/half.h"
#include "kernels/forced_inline.h"
#include "kernels/kernels.h"

void qsf_vecops_fill_scalar(qsf_kernels *k);
#if QSF_ARCH_X86
void qsf_vecops_fill_avx2(qsf_kernels *k);
void qsf_vecops_fill_avx512(qsf_kernels *k);
/* The integer products of AVX-512, for the levels above it; NULL for a type without an integer form
 */
qsf_matmul_fn *qsf_matmul_avx512(qsf_dtype dtype);
qsf_value_products_fn *qsf_value_products_avx512(void);
#endif
#if QSF_ARCH_ARM
void qsf_vecops_fill_neon(qsf_kernels *k);
#endif
