/* low_rank.c - what adapters add: once, in order, and to no row more, by the text of kernels.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/bytes.h"
#include "base/half.h"
#include "kernel_data.h"

#define N_TOKENS 9 /* eight or fours, and one more */
#define MAX_ROWS 50
#define MAX_RANK 19
#define Z_STRIDE 32
#define Y_STRIDE 60
#define N_HALVES ((size_t)64 * MAX_RANK)

static float number_of(const unsigned char *b, bool is_8bit, size_t rank, size_t r, size_t i)
{
    const unsigned char *const tile = b + r / 16 * (rank * 16 + 32) + 32;
    return is_8bit ? (float)(tile[i * 16 + r % 16] - 128)
                   : qsf_half_to_float(qsf_load_u16(b + 2 * ((r / 16 * rank + i) * 16 + r % 16)));
}

static void check_level(const qsf_kernels *k, const unsigned char *b, bool is_8bit, const float *z)
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
                    for (size_t i = 0; i < rank; i++)
                        acc = fmaf(number_of(b, is_8bit, rank, r, i), z[t * Z_STRIDE + i], acc);
                    const unsigned char *const scales = b + r / 16 * (rank * 16 + 32);
                    const float scale =
                        is_8bit ? qsf_half_to_float(qsf_load_u16(scales + 2 * (r % 16))) : 1.0F;
                    float *const to = &expected[t * Y_STRIDE + r];
                    *to = fmaf(scale, acc, *to);
                }
            k->add_low_rank(b, is_8bit, rank, n_rows, z, Z_STRIDE, N_TOKENS, y, Y_STRIDE);
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
    for (int is_8bit = 0; is_8bit < 2; is_8bit++) {
        check_level(&scalar, b, is_8bit, z);
        for (size_t i = 0; i < n_levels; i++)
            check_level(&levels[i], b, is_8bit, z);
    }
    return check_report("low_rank");
}
