/* quantise.c - activations to integers: scalar against the contract of kernels.h, every level
 * against scalar byte by byte.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"

#define MOST_BLOCKS 43
#define N_BLOCKS (MOST_BLOCKS + 1) /* one that nobody writes */

typedef struct planes {
    int8_t q[N_BLOCKS * QSF_BLOCK];
    int8_t q_low[N_BLOCKS * QSF_BLOCK];
    float scale[N_BLOCKS];
    int32_t sum[N_BLOCKS];
    qsf_act_parts parts[N_BLOCKS];
    float scaled_sum[N_BLOCKS];
    int32_t fine_sum[N_BLOCKS];
} planes;

typedef struct row_args {
    const float *x;
    size_t n_blocks;
    bool by_halves;
} row_args;

static void make_alike(float *x)
{
    if (isnan(*x))
        *x = NAN;
}

static void run_quantise(const qsf_kernels *k, const void *args, float *out)
{
    const row_args *const a = args;
    planes *const to = (planes *)(void *)out;
    const qsf_act_row row = {to->q,     to->q_low,      to->scale,   to->sum,
                             to->parts, to->scaled_sum, to->fine_sum};
    k->quantise(a->x, a->n_blocks, a->by_halves, &row);
    for (size_t b = 0; b < a->n_blocks; b++) { /* of scales that are NaN any NaN will do */
        make_alike(&to->scale[b]);
        make_alike(&to->scaled_sum[b]);
        make_alike(&to->parts[b].scale[0]);
        make_alike(&to->parts[b].scale[1]);
    }
}

static float top_magnitude(const float *x, size_t n)
{
    float amax = 0.0F;
    for (size_t i = 0; i < n; i++)
        amax = isnan(x[i]) || isnan(amax) ? NAN : fmaxf(amax, fabsf(x[i]));
    return amax;
}

/* Block b of a row: x [64] */
static void check_block(const float *x, const planes *row, size_t b, bool by_halves)
{
    const float scale = row->scale[b];
    const float scaled_sum = row->scaled_sum[b];
    const qsf_act_parts *const have = &row->parts[b];
    const size_t n = by_halves ? 32 : 64; /* columns that share a scale */
    const float amax[2] = {top_magnitude(x, n), top_magnitude(x + 64 - n, n)};
    int32_t total = 0;
    qsf_act_parts parts = {{0}, {0}, 0};
    int32_t fine_total = 0;
    bool all_right = true;
    for (size_t i = 0; i < QSF_BLOCK; i++) {
        const float top = amax[i / 32];
        const int8_t q = row->q[b * QSF_BLOCK + i];
        const bool is_zero = !(top >= 0x1p-112F) || isinf(top);
        const double scaled = is_zero ? 0.0 : (double)(x[i] * (32512.0F / top));
        const int32_t fine = 256 * q + row->q_low[b * QSF_BLOCK + i];
        all_right = all_right && (double)fine == nearbyint(scaled);
        all_right = all_right && (double)q == floor((double)fine / 256.0 + 0.5);
        total += q;
        parts.quarter[i / 16] = (int16_t)(parts.quarter[i / 16] + q);
        parts.first_fine += i < 32 ? fine : 0;
        fine_total += fine;
    }
    CHECK(all_right);
    CHECK_EQ(row->sum[b], total);
    CHECK(memcmp(have->quarter, parts.quarter, sizeof parts.quarter) == 0);
    CHECK_EQ(have->first_fine, parts.first_fine);
    for (size_t h = 0; h < 2; h++)
        CHECK(isnan(amax[h]) ? isnan(have->scale[h]) : have->scale[h] == amax[h] / 127.0F);
    CHECK_EQ(row->fine_sum[b], fine_total);
    CHECK(memcmp(&scale, &have->scale[0], sizeof scale) == 0);
    if (!by_halves) /* parts are summed where they are used */
        CHECK(isnan(amax[0]) || isinf(amax[0]) ? isnan(scaled_sum)
                                               : scaled_sum == scale * (float)total);
}

static void check_rows(size_t n_blocks, fill how, bool by_halves)
{
    float *const x = filled_floats(n_blocks * QSF_BLOCK, how);
    if (how == FILL_BITS) /* one special value in an ordinary block, at each place */
        for (size_t b = 0; b < n_blocks; b++) {
            const float special = b % 3 == 0 ? NAN : b % 3 == 1 ? -INFINITY : 0x1.8p-113F;
            fill_floats(x + b * QSF_BLOCK, QSF_BLOCK, b % 3 == 2 ? FILL_ZEROS : FILL_RANDOM);
            x[b * QSF_BLOCK + (b * 7 + 3) % QSF_BLOCK] = special;
        }
    const row_args args = {x, n_blocks, by_halves};
    output want = run_kernel(&scalar, run_quantise, &args, NULL, sizeof(planes));
    want.has_codes = true;
    for (size_t b = 0; b < n_blocks; b++)
        check_block(x + b * QSF_BLOCK, want.at, b, by_halves);
    check_levels(&want, true, run_quantise, &args, NULL, label("quantise", n_blocks * 64, how));
    free(want.block);
    free(x);
}

int check_quantise(void)
{
    for (size_t n_blocks = 1; n_blocks <= MOST_BLOCKS; n_blocks += 6)
        for (fill how = FILL_RANDOM; how < FILL_COUNT; how++)
            for (int by_halves = 0; by_halves < 2; by_halves++)
                check_rows(n_blocks, how, by_halves != 0);
    return check_report("quantise");
}
