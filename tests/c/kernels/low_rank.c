/* low_rank.c - what adapters add: once, in order, and to no row more, by the text of kernels.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/bytes.h"
#include "base/half.h"
#include "kernel_data.h"

#define N_TOKENS 9 /* fours, and one more */
#define MAX_ROWS 50
#define MAX_RANK 19
#define Z_STRIDE 32
#define Y_STRIDE 60
#define N_HALVES ((size_t)64 * MAX_RANK)

static void check_level(const qsf_kernels *k, const unsigned char *b, const float *z)
{
    for (size_t n_rows = 1; n_rows <= MAX_ROWS; n_rows++)
        for (size_t rank = 1; rank <= MAX_RANK; rank += 3) {
            float y[N_TOKENS * Y_STRIDE];
            float expected[N_TOKENS * Y_STRIDE];
            fill_floats(y, N_TOKENS * Y_STRIDE, FILL_RANDOM);
            memcpy(expected, y, sizeof y);
            for (size_t t = 0; t < N_TOKENS; t++)
                for (size_t r = 0; r < n_rows; r++) {
                    float acc = 0.0F;
                    for (size_t i = 0; i < rank; i++) {
                        const size_t at = (r / 16 * rank + i) * 16 + r % 16;
                        acc = fmaf(qsf_half_to_float(qsf_load_u16(b + 2 * at)), z[t * Z_STRIDE + i],
                                   acc);
                    }
                    expected[t * Y_STRIDE + r] += acc;
                }
            k->add_low_rank(b, rank, n_rows, z, Z_STRIDE, N_TOKENS, y, Y_STRIDE);
            CHECK_BYTES(y, expected, sizeof y);
        }
}

int check_low_rank(void)
{
    static unsigned char b[2 * N_HALVES];
    static float z[N_TOKENS * Z_STRIDE];
    fill_floats(z, N_TOKENS * Z_STRIDE, FILL_RANDOM);
    for (size_t i = 0; i < N_HALVES; i++) /* every seventh is subnormal */
        qsf_store_u16(b + 2 * i, i % 7 == 1 ? (uint16_t)(0x8000 + i % 1000)
                                            : qsf_half_from_float(random_unit() * 9.0F));
    check_level(&scalar, b, z);
    for (size_t i = 0; i < n_levels; i++)
        check_level(&levels[i], b, z);
    return check_report("low_rank");
}
