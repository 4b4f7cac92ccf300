/* quantise.c - activations to integers: scalar against the contract of kernels.h, every level
 * against scalar byte by byte.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"

static uint64_t n_compared;

typedef struct quantised {
    output q;
    output q_low;
    output scale;
    output sum;
    output parts;
    output scaled_sum;
    output fine_sum;
} quantised;

static quantised run_quantise(const qsf_kernels *k, const float *x, size_t n_blocks, bool by_halves)
{
    const quantised z = {output_make(n_blocks * QSF_BLOCK),
                         output_make(n_blocks * QSF_BLOCK),
                         output_make(n_blocks * sizeof(float)),
                         output_make(n_blocks * sizeof(int32_t)),
                         output_make(n_blocks * sizeof(qsf_act_parts)),
                         output_make(n_blocks * sizeof(float)),
                         output_make(n_blocks * sizeof(int32_t))};
    const qsf_act_row row = {z.q.at,     z.q_low.at,      z.scale.at,   z.sum.at,
                             z.parts.at, z.scaled_sum.at, z.fine_sum.at};
    k->quantise(x, n_blocks, by_halves, &row);
    return z;
}

static void quantised_free(quantised *z)
{
    free(z->q.block);
    free(z->q_low.block);
    free(z->scale.block);
    free(z->sum.block);
    free(z->parts.block);
    free(z->scaled_sum.block);
    free(z->fine_sum.block);
}

static float top_magnitude(const float *x, size_t n)
{
    float amax = 0.0F;
    for (size_t i = 0; i < n; i++)
        amax = isnan(x[i]) || isnan(amax) ? NAN : fmaxf(amax, fabsf(x[i]));
    return amax;
}

/* Block b of a row: x [64] */
static void check_quantised_block(const float *x, const quantised *z, size_t b, bool by_halves)
{
    const int8_t *const q = (const int8_t *)z->q.at + b * QSF_BLOCK;
    const int8_t *const q_low = (const int8_t *)z->q_low.at + b * QSF_BLOCK;
    const float scale = ((const float *)z->scale.at)[b];
    const float scaled_sum = ((const float *)z->scaled_sum.at)[b];
    const qsf_act_parts *const have = (const qsf_act_parts *)z->parts.at + b;
    const size_t n = by_halves ? 32 : 64; /* columns that share a scale */
    const float amax[2] = {top_magnitude(x, n), top_magnitude(x + 64 - n, n)};
    int32_t total = 0;
    qsf_act_parts parts = {{0}, {0}, 0};
    int32_t fine_total = 0;
    bool all_right = true;
    for (size_t i = 0; i < QSF_BLOCK; i++) {
        const float top = amax[i / 32];
        const bool is_zero = !(top >= 0x1p-112F) || isinf(top);
        const double scaled = is_zero ? 0.0 : (double)(x[i] * (32512.0F / top));
        const int32_t fine = 256 * q[i] + q_low[i];
        all_right = all_right && (double)fine == nearbyint(scaled);
        all_right = all_right && (double)q[i] == floor((double)fine / 256.0 + 0.5);
        total += q[i];
        parts.quarter[i / 16] = (int16_t)(parts.quarter[i / 16] + q[i]);
        parts.first_fine += i < 32 ? fine : 0;
        fine_total += fine;
    }
    CHECK(all_right);
    CHECK(((const int32_t *)z->sum.at)[b] == total);
    CHECK(memcmp(have->quarter, parts.quarter, sizeof parts.quarter) == 0);
    CHECK(have->first_fine == parts.first_fine);
    for (size_t h = 0; h < 2; h++)
        CHECK(isnan(amax[h]) ? isnan(have->scale[h]) : have->scale[h] == amax[h] / 127.0F);
    CHECK(((const int32_t *)z->fine_sum.at)[b] == fine_total);
    CHECK(memcmp(&scale, &have->scale[0], sizeof scale) == 0);
    if (!by_halves) /* parts are summed where they are used */
        CHECK(isnan(amax[0]) || isinf(amax[0]) ? isnan(scaled_sum)
                                               : scaled_sum == scale * (float)total);
}

/* Every field; of scales that are NaN any NaN will do. */
static void check_parts(const quantised *want, const quantised *have, size_t n_blocks)
{
    const qsf_act_parts *const a = (const void *)want->parts.at;
    const qsf_act_parts *const b = (const void *)have->parts.at;
    for (size_t i = 0; i < n_blocks; i++) {
        CHECK(memcmp(a[i].quarter, b[i].quarter, sizeof a->quarter) == 0);
        CHECK(a[i].first_fine == b[i].first_fine);
        for (size_t h = 0; h < 2; h++)
            CHECK(isnan(a[i].scale[h]) ? isnan(b[i].scale[h]) : a[i].scale[h] == b[i].scale[h]);
    }
}

static void check_rows(size_t n_blocks, fill how, bool by_halves)
{
    float *const x = exact_floats(n_blocks * QSF_BLOCK);
    fill_floats(x, n_blocks * QSF_BLOCK, how);
    if (how == FILL_BITS) /* one special value in an ordinary block, at each place */
        for (size_t b = 0; b < n_blocks; b++) {
            const float special = b % 3 == 0 ? NAN : b % 3 == 1 ? -INFINITY : 0x1.8p-113F;
            fill_floats(x + b * QSF_BLOCK, QSF_BLOCK, b % 3 == 2 ? FILL_ZEROS : FILL_RANDOM);
            x[b * QSF_BLOCK + (b * 7 + 3) % QSF_BLOCK] = special;
        }
    quantised want = run_quantise(&scalar, x, n_blocks, by_halves);
    for (size_t b = 0; b < n_blocks; b++)
        check_quantised_block(x + b * QSF_BLOCK, &want, b, by_halves);
    for (size_t i = 0; i < n_levels; i++) {
        quantised have = run_quantise(&levels[i], x, n_blocks, by_halves);
        CHECK_BYTES(want.q.at, have.q.at, want.q.n_bytes);
        CHECK_BYTES(want.q_low.at, have.q_low.at, want.q_low.n_bytes);
        CHECK_BYTES(want.sum.at, have.sum.at, want.sum.n_bytes);
        check_parts(&want, &have, n_blocks);
        CHECK_BYTES(want.fine_sum.at, have.fine_sum.at, want.fine_sum.n_bytes);
        CHECK(output_guards_intact(&have.q) && output_guards_intact(&have.q_low));
        CHECK(output_guards_intact(&have.parts));
        CHECK(output_guards_intact(&have.sum) && output_guards_intact(&have.fine_sum));
        check_outputs(&want.scale, &have.scale, levels[i].isa_name, "quantise: scale");
        check_outputs(&want.scaled_sum, &have.scaled_sum, levels[i].isa_name,
                      "quantise: scaled_sum");
        quantised_free(&have);
        n_compared++;
    }
    quantised_free(&want);
    free(x);
}

int check_quantise(void)
{
    for (size_t n_blocks = 1; n_blocks <= 43; n_blocks += 6)
        for (fill how = FILL_RANDOM; how < FILL_COUNT; how++)
            for (int by_halves = 0; by_halves < 2; by_halves++)
                check_rows(n_blocks, how, by_halves != 0);
    CHECK(n_compared >= 128 * n_levels);
    return check_report("quantise");
}

static void run_blocks(const qsf_kernels *k, const void *args)
{
    enum { N = 16 };
    static int8_t planes[2][N * QSF_BLOCK];
    static float scales[2][N];
    static int32_t sums[2][N];
    static qsf_act_parts parts[N];
    const qsf_act_row row = {planes[0], planes[1], scales[0], sums[0], parts, scales[1], sums[1]};
    k->quantise(args, N, false, &row);
}

void bench_quantise(void)
{
    static float x[16 * QSF_BLOCK];
    fill_floats(x, COUNT_OF(x), FILL_RANDOM);
    bench_line("quantise", (double)COUNT_OF(x), run_blocks, x);
}
