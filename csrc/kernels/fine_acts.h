/* fine_acts.h - 16-bit activations used in place: load_fine() of matmul_int_tmpl.h for instruction
 * sets that multiply both parts as bytes.
 *
 * Included inside a target region.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A block of some tokens */
typedef struct fine_acts {
    const int8_t *q;
    const int8_t *q_low;
    size_t q_stride;
} fine_acts;

QSF_FORCED_INLINE void load_fine(const int8_t *q, const int8_t *q_low, size_t q_stride,
                                 size_t n_tokens, fine_acts *x)
{
    (void)n_tokens;
    *x = (fine_acts){q, q_low, q_stride};
}
