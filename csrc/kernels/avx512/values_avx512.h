/* values_avx512.h - the float step of values that are codes, for AVX-512 and AMX.
 *
 * Included inside a target region, after lanes_avx512.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Values of row r of 16 dims from their dots, whose codes have zero point 128 */
QSF_FORCED_INLINE lanes values_of(__m512i dot, const qsf_value_weights *w, size_t r)
{
    const __m512i zero = _mm512_set1_epi32(128 * w->fine_sum[r]);
    return lanes_fma(_mm512_cvtepi32_ps(_mm512_sub_epi32(dot, zero)), lanes_set(w->factor[r]),
                     lanes_set(w->start[r]));
}
