/* outliers.c - sparse outlier tables: what they add is added once and in its order, by the text of
 * docs/format.md. In whole models: tests/python/api/test_same_bits.py and test_forward.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/bytes.h"
#include "base/half.h"
#include "kernel_data.h"

#define N_TOKENS 9 /* fours, and one more */
#define N_COLS 100 /* two blocks, the second cut off */
#define X_STRIDE 128
#define Y_STRIDE 80

static float acts[N_TOKENS * X_STRIDE];

/* What a table adds to y [N_TOKENS, y_stride] of all rows, by the text of docs/format.md. */
static void add_naively(const unsigned char *table, size_t n_rows, float *y, size_t y_stride)
{
    const size_t n_tile_rows = (n_rows + 15) / 16;
    const unsigned char *const entries = table + 4 * (n_tile_rows + 1);
    for (size_t i = 0; i < n_tile_rows; i++) {
        long position = -1;
        for (size_t e = qsf_load_u32(table + 4 * i); e < qsf_load_u32(table + 4 * i + 4); e++) {
            position += qsf_load_u16(entries + 4 * e);
            const float delta = qsf_half_to_float(qsf_load_u16(entries + 4 * e + 2));
            const size_t row = 16 * i + (size_t)position % 16;
            for (size_t t = 0; t < N_TOKENS; t++) {
                float *const at = &y[t * y_stride + row];
                *at = fmaf(delta, acts[t * X_STRIDE + (size_t)position / 16], *at);
            }
        }
    }
}

static void check_level(const qsf_kernels *k)
{
    const qsf_acts x = {.n_tokens = N_TOKENS, .n_blocks = X_STRIDE / QSF_BLOCK, .f32 = acts};
    for (size_t n_rows = 1; n_rows <= 16; n_rows++)
        for (uint32_t n_entries = 0; n_entries <= 117; n_entries += 13) {
            unsigned char table[8 + 4 * 117] = {0};
            uint32_t position = 0;
            qsf_store_u32(table + 4, n_entries);
            for (uint32_t i = 0; i < n_entries; i++) {
                uint32_t step = 1 + (i * 7 + n_entries) % 8;
                while ((position + step - 1) % 16 >= n_rows)
                    step++;
                position += step;
                qsf_store_u16(table + 8 + 4 * i, (uint16_t)step);
                const uint16_t subnormal = (uint16_t)(0x8000 + 37 * i + 1);
                qsf_store_u16(table + 10 + 4 * i,
                              i % 5 == 1 ? subnormal : qsf_half_from_float(random_unit() * 9.0F));
            }
            float y[N_TOKENS * Y_STRIDE];
            float expected[N_TOKENS * Y_STRIDE];
            fill_floats(y, N_TOKENS * Y_STRIDE, FILL_RANDOM);
            memcpy(expected, y, sizeof y);
            add_naively(table, n_rows, expected, Y_STRIDE);
            k->add_outliers(table + 8, n_entries, n_rows, &x, y, Y_STRIDE);
            CHECK_BYTES(y, expected, sizeof y);
        }
}

int check_outliers(void)
{
    for (size_t t = 0; t < N_TOKENS; t++)
        fill_floats(acts + t * X_STRIDE, N_COLS, FILL_RANDOM);
    check_level(&scalar);
    for (size_t i = 0; i < n_levels; i++)
        check_level(&levels[i]);
    return check_report("outliers");
}
