/* kernel_data.h - inputs for the kernel tests: exact buffers, guarded outputs, hostile fills.
 *
 * Inputs are allocated to the byte, so that a sanitizer sees one byte read too many;
 * outputs have guard bytes on both sides. Everything follows from one printed seed.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_KERNEL_DATA_H
#define QSF_TESTS_KERNEL_DATA_H

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fused.h"
#include "check.h"
#include "kernels/kernels.h"

/* What is compared: `scalar`, the specification, with the levels that this machine has besides
 * (or the one that --isa names). */
extern qsf_kernels scalar;
extern qsf_kernels levels[QSF_ISA_COUNT];
extern size_t n_levels;

/* The groups of kernels: each checks its kernels on all levels and returns check_report(). */
int check_attend(void);
int check_hadamard(void);
int check_dequant_row(void);
int check_exp(void);
int check_matmul(void);
int check_matmul_exact(void);
int check_low_rank(void);
int check_outliers(void);
int check_quantise(void);
int check_recur(void);
int check_vecops(void);

/* Runs a kernel on what args point to; out is where it writes, and for some what it begins with. */
typedef void kernel_run(const qsf_kernels *k, const void *args, float *out);

/* Of --bench: runs whose description has this part are timed; NULL: none. */
extern const char *bench_part;

/* Prints one line: how long a run takes on scalar and on each level. */
void bench_line(const char *what, kernel_run *run, const void *args, const float *before,
                size_t n_bytes);

typedef enum fill {
    FILL_RANDOM, /* ordinary values */
    FILL_ZEROS,
    FILL_LARGEST,  /* every product as large as it can be, one sign */
    FILL_SMALLEST, /* the other sign */
    FILL_EXTREMES, /* largest and smallest at random */
    FILL_DENORMAL,
    FILL_HUGE, /* overflows */
    FILL_BITS, /* any bits: infinities and NaNs of every kind */
    FILL_COUNT
} fill;

extern uint64_t random_seed; /* of the whole program: --seed */
extern uint64_t random_state;

static inline void random_restart(uint64_t salt)
{
    random_state = random_seed * UINT64_C(0x9E3779B97F4A7C15) + salt;
}

/* splitmix64 */
static inline uint32_t random_u32(void)
{
    random_state += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t z = random_state;
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return (uint32_t)(z >> 32);
}

/* -1 .. 1 */
static inline float random_unit(void)
{
    return (float)random_u32() / 2147483648.0F - 1.0F;
}

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Exactly n_bytes, to be given to free(); stops the test when there is no memory. */
static inline void *exact_alloc(size_t n_bytes)
{
    void *const p = malloc(n_bytes + (n_bytes == 0));
    if (p == NULL) {
        printf("no memory for %zu bytes\n", n_bytes);
        exit(2);
    }
    return p;
}

static inline float *exact_floats(size_t n)
{
    return exact_alloc(n * sizeof(float));
}

#define GUARD_BYTES 64

/* n_bytes of output between guards; begins as 0x4D4D4D4D..., which is no NaN. */
typedef struct output {
    unsigned char *block;
    void *at;
    size_t n_bytes;
    bool has_codes; /* all bits count: it is not only of floats */
} output;

static inline output output_make(size_t n_bytes)
{
    output o = {exact_alloc(n_bytes + 2 * GUARD_BYTES), NULL, n_bytes, false};
    memset(o.block, 0xA5, n_bytes + 2 * GUARD_BYTES);
    o.at = o.block + GUARD_BYTES;
    memset(o.at, 0x4D, n_bytes);
    return o;
}

static inline bool output_guards_intact(const output *o)
{
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if (o->block[i] != 0xA5 || o->block[GUARD_BYTES + o->n_bytes + i] != 0xA5)
            return false;
    return true;
}

/* The same bits; of NaNs only that both are (IEEE 754 leaves open which of two operands'
 * payloads survives). Returns the first difference, or n. */
static inline size_t first_difference(const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(a + i, b + i, sizeof *a) != 0 && !(isnan(a[i]) && isnan(b[i])))
            return i;
    return n;
}

static inline void check_outputs(const output *want, const output *have, const char *isa,
                                 const char *what)
{
    const float *const a = want->at;
    const float *const b = have->at;
    const size_t n = want->n_bytes / sizeof(float);
    const size_t i = first_difference(a, b, n);
    const bool is_same = want->has_codes ? memcmp(a, b, want->n_bytes) == 0 : i == n;
    if (CHECK(is_same && output_guards_intact(want) && output_guards_intact(have)))
        return;
    if (is_same)
        printf("  %s on %s: wrote outside its output\n", what, isa);
    else if (want->has_codes)
        printf("  %s on %s: other bytes than scalar\n", what, isa);
    else
        printf("  %s on %s: [%zu] of %zu is %a, scalar %a\n", what, isa, i, n, (double)b[i],
               (double)a[i]);
}

/* The output of a kernel; its content is `before` at first, unless `before` is NULL. */
static inline output run_kernel(const qsf_kernels *k, kernel_run *run, const void *args,
                                const float *before, size_t n_bytes)
{
    const output out = output_make(n_bytes);
    if (before != NULL)
        memcpy(out.at, before, n_bytes);
    run(k, args, out.at);
    return out;
}

/* Checks that a kernel gives `want` on scalar, unless that is where `want` is from, and on each
 * level. */
static inline void check_levels(const output *want, bool is_of_scalar, kernel_run *run,
                                const void *args, const float *before, const char *what)
{
    if (bench_part != NULL && strstr(what, bench_part) != NULL)
        bench_line(what, run, args, before, want->n_bytes);
    for (size_t i = is_of_scalar; i <= n_levels; i++) {
        const qsf_kernels *const k = i == 0 ? &scalar : &levels[i - 1];
        const output have = run_kernel(k, run, args, before, want->n_bytes);
        check_outputs(want, &have, k->isa_name, what);
        free(have.block);
    }
}

/* The output [n] of scalar, to which all levels were compared. */
static inline output check_kernel(kernel_run *run, const void *args, const float *before, size_t n,
                                  const char *what)
{
    const output want = run_kernel(&scalar, run, args, before, n * sizeof(float));
    check_levels(&want, true, run, args, before, what);
    return want;
}

static inline const char *label(const char *op, size_t n, fill how)
{
    static char what[96];
    snprintf(what, sizeof what, "%s, n %zu, fill %d", op, n, (int)how);
    return what;
}

static inline void fill_floats(float *x, size_t n, fill how)
{
    for (size_t i = 0; i < n; i++) {
        const bool odd = (random_u32() & 1) != 0;
        switch (how) {
        case FILL_RANDOM:
            x[i] = random_unit() * 3.0F;
            break;
        case FILL_ZEROS:
            x[i] = odd ? -0.0F : 0.0F;
            break;
        case FILL_LARGEST:
            x[i] = 100.0F;
            break;
        case FILL_SMALLEST:
            x[i] = -100.0F;
            break;
        case FILL_EXTREMES:
            x[i] = odd ? 1000.0F : -0.001F;
            break;
        case FILL_DENORMAL:
            x[i] = float_of_bits(random_u32() & 0x80FFFFFF);
            break;
        case FILL_HUGE:
            x[i] = random_unit() * FLT_MAX;
            break;
        case FILL_BITS:
            x[i] = float_of_bits(random_u32() | (odd ? 0x7F800000U : 0U));
            break;
        case FILL_COUNT:
            break;
        }
    }
}

/* exact_floats() that are filled */
static inline float *filled_floats(size_t n, fill how)
{
    float *const x = exact_floats(n);
    fill_floats(x, n, how);
    return x;
}

#endif
