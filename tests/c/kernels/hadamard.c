/* hadamard.c - rotation by a Hadamard matrix: every level against scalar bit by bit, and scalar
 * against the formula in double.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_data.h"

static double sign_of(size_t i, size_t j)
{
    size_t bits = i & j;
    int sign = 1;
    for (; bits != 0; bits &= bits - 1)
        sign = -sign;
    return sign;
}

/* y [m] = x [m], transformed by the formula. */
static void check_hadamard_block(const float *x, const float *y, size_t m)
{
    double sum_abs = 0.0;
    for (size_t i = 0; i < m; i++)
        sum_abs += fabs((double)x[i]);
    for (size_t i = 0; i < m; i++) {
        double sum = 0.0;
        for (size_t j = 0; j < m; j++)
            sum += sign_of(i, j) * (double)x[j];
        /* log2 m additions, a quotient, a root and a product, each off by half an ulp */
        CHECK(fabs((double)y[i] - sum / sqrt((double)m)) <=
              16.0 * (double)FLT_EPSILON * sum_abs / sqrt((double)m));
    }
}

static void run_hadamard(const qsf_kernels *k, const void *n, float *out)
{
    k->hadamard(out, *(const size_t *)n);
}

static void check_size(size_t n, fill how)
{
    float *const x = filled_floats(n, how);
    const output want = check_kernel(run_hadamard, &n, x, n, label("hadamard", n, how));
    if (how == FILL_RANDOM) {
        size_t begin = 0;
        for (size_t m = 4096; m >= 16; m /= 2)
            if ((n & m) != 0) {
                check_hadamard_block(x + begin, (const float *)want.at + begin, m);
                begin += m;
            }
        CHECK(memcmp((const float *)want.at + begin, x + begin, (n - begin) * sizeof *x) == 0);
    }
    free(want.block);
    free(x);
}

int check_hadamard(void)
{
    random_restart(1);
    static const size_t sizes[] = {16,   32,   64, 128, 256, 512, 1024,
                                   2048, 4096, 17, 40,  80,  96,  127};
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        for (fill how = 0; how < FILL_COUNT; how++)
            check_size(sizes[i], how);
    return check_report("hadamard");
}
