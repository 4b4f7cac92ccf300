/* matmul_avx512.h - the integer products of AVX-512, for the instruction sets above it. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "kernels/kernels.h"

/* NULL for a type without an integer form. */
qsf_matmul_fn *qsf_matmul_avx512(qsf_dtype dtype);

qsf_value_products_fn *qsf_value_products_avx512(void);
