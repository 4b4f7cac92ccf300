/* kernels.h - the table of inner loops: the contract of each kernel.
 *
 * A kernel is pure: no allocation, threads, i/o or failure, and no knowledge of
 * models. Every instruction set gives the same bits as scalar, because each
 * contract fixes the order of floating-point operations (integer sums are exact
 * and may be reordered). Every multiply-add is an explicit fmaf.
 *
 * "16-lane sum" below means: lane l = 0..15 starts at +0 and accumulates elements
 * l, l+16, l+32, ... in that order (missing ones count as zero); then lanes are
 * added as l += l+8, l += l+4, l += l+2, l += l+1.
 *
 * Buffers need no alignment and do not overlap unless said.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_KERNELS_KERNELS_H
#define QSF_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "platform/cpu.h"

#define QSF_KV_PAGE_TOKENS 32

/* The activations of n_tokens tokens, in the two forms that weights may want.
 * Columns are padded with zeros to n_blocks * 64. */
typedef struct qsf_acts {
    size_t n_tokens;
    size_t n_blocks;
    const float *f32;        /* [n_tokens, n_blocks * 64] */
    const int8_t *q;         /* [n_tokens, n_blocks * 64], -127..127 */
    const int8_t *q_low;     /* [n_tokens, n_blocks * 64]: x is near scale * (q + q_low / 256) */
    const float *scale;      /* [n_tokens, n_blocks] */
    const int32_t *sum;      /* [n_tokens, n_blocks], sum of the block's q */
    const float *scaled_sum; /* [n_tokens, n_blocks], scale * (float)sum */
    const int32_t *fine_sum; /* [n_tokens, n_blocks], sum of the block's 256 * q + q_low */
} qsf_acts;

/* Where the integers of one token's activations go; as in qsf_acts, without n_tokens. */
typedef struct qsf_act_row {
    int8_t *q;
    int8_t *q_low;
    float *scale;
    int32_t *sum;
    float *scaled_sum;
    int32_t *fine_sum;
} qsf_act_row;

/* y[t * y_stride + r] = sum over columns of w[r][c] * x[t][c], for the 16 rows r of
 * each of n_tile_rows consecutive tile rows (tile row i writes y + 16 * i). `tiles`
 * holds n_tile_rows * x->n_blocks tiles as they lie in the file.
 *
 * Integer form (quantised weights), per row and token, blocks b ascending, acc from +0:
 *   with a min (2, 3, 4 bits), with 8-bit activations:
 *     dot = exact integer sum of code * q
 *     acc = fmaf((float)dot, w_scale * x_scale, acc)
 *     acc = fmaf(w_min, scaled_sum, acc)
 *   symmetric, with 8-bit activations; value of a code in units of the scale: 2-bit
 *   (2 code - 3) / 2, 4-bit code - 8, ternary and dense ternary code - 1:
 *     dot = exact integer sum of value * q, of 2 * value * q for 2 bits
 *     acc = fmaf((float)dot, w_scale * x_scale, acc), for 2 bits with w_scale / 2
 *   8-bit, with 16-bit activations (their rounding would otherwise exceed the weights'):
 *     dot = exact integer sum of (code - 128) * (256 * q + q_low), below 2^28
 *     acc = fmaf((float)dot, w_scale * (x_scale * 2^-8), acc)
 * f32 form (f16 and f32 weights, and every type when exact), columns c ascending:
 *     acc = fmaf(w[r][c], x[c], acc)
 * where a quantised w is fmaf((float)code, scale, min) with a min, and the value of its code
 * times the scale, rounded once, without.
 *
 * Any bytes are codes: a ternary code of 3 has value 2, and trit k = 0..4 of a dense byte is
 * ((byte * 3^k mod 256) * 3) >> 8, whatever the byte. */
typedef void qsf_matmul_fn(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x,
                           float *y, size_t y_stride);

/* Row `row_in_tile` of a tile row, as f32: out [n_blocks * 64]. Values as in the f32 form. */
typedef void qsf_dequant_row_fn(const unsigned char *tiles, size_t n_blocks, size_t row_in_tile,
                                float *out);

/* x [n_blocks * 64] to integers, per block: amax = largest |x|; scale = amax / 127;
 * fine = rint(x * (32512 / amax)), ties to even, 32512 = 127 * 256; q = fine / 256 rounded
 * to nearest (halves up), q_low = fine - 256 * q. All zero when amax is below 2^-112
 * (32512 / amax would overflow) or not finite. A NaN in the block makes amax NaN, and with
 * it the scale and every sum that the block enters; so does an infinity, once it meets the
 * zeros. */
#define QSF_QUANTISE_MIN 0x1p-112F

typedef void qsf_quantise_fn(const float *x, size_t n_blocks, const qsf_act_row *out);

/* out[i] = x[i] * (1 / sqrt(mean + eps)) * w[i]: rounded after each multiplication;
 * mean = 16-lane sum of fmaf(x, x, lane) / n. out may be x. */
typedef void qsf_rmsnorm_fn(const float *x, const float *w, float eps, size_t n, float *out);

/* mean m = 16-lane sum of x / n; var = 16-lane sum of fmaf(d, d, lane) / n, d = x - m;
 * out[i] = fmaf(d * (1 / sqrt(var + eps)), w[i], b[i]). b may be NULL (zero). out may be x. */
typedef void qsf_layernorm_fn(const float *x, const float *w, const float *b, float eps, size_t n,
                              float *out);

/* Rotates n_pairs pairs in place by (cos, sin)[i]:
 *   a' = fmaf(a, cos, -(b * sin)), b' = fmaf(b, cos, a * sin).
 * Split: pair i is (x[i], x[i + n_pairs]); interleaved: (x[2i], x[2i + 1]). */
typedef void qsf_rope_fn(float *x, const float *cos, const float *sin, size_t n_pairs);

/* Activation functions, in place on x [n]; built on the table's exp (vecops.h). */
typedef void qsf_activation_fn(float *x, size_t n);

/* gate[i] = activation(gate[i]) * up[i] for SiLU. */
typedef void qsf_silu_mul_fn(float *gate, const float *up, size_t n);

/* x[i] += y[i]. */
typedef void qsf_add_fn(float *x, const float *y, size_t n);

/* Stores one position of K (column `slot` of a page [head_dim, 32]) or of V (row
 * `slot` of a page [32, head_dim]); pages hold f16 (round to nearest even) or f32. */
typedef void qsf_kv_store_fn(const float *x, size_t head_dim, size_t slot, void *page);

/* One query head against positions [first, end), first < end, of one KV head.
 * Position p lies in page p / 32, slot p % 32 of k_pages / v_pages (the arrays are
 * indexed from page 0).
 *   score[p] = (over d ascending, from +0: fmaf(q[d], k[p][d], acc)) * scale
 *   e[p] = exp(score[p] - max); total = 16-lane sum of e by p (lane p % 16)
 *   out[d] = (over p ascending, from +0: fmaf(e[p], v[p][d], acc)) * (1 / total)
 * scores: scratch of at least 32 * (end / 32 + 1) floats. */
typedef void qsf_attend_fn(const float *q, const void *const *k_pages, const void *const *v_pages,
                           size_t head_dim, size_t first, size_t end, float scale, float *scores,
                           float *out);

/* The vocabulary, for sampling. x [n]; no x is NaN where not said otherwise. Strip s is
 * elements 256 s .. 256 s + 255, and bucket 16 s + l those of them with index l modulo 16: to
 * find the largest few of n, look into the buckets whose largest is large enough. */
#define QSF_STRIP 256
#define QSF_STRIP_BUCKETS 16

/* Is no x infinite or NaN? */
typedef bool qsf_all_finite_fn(const float *x, size_t n);

/* out[b] = largest x of bucket b (-infinity when it has none), for all buckets of strips
 * 0 .. ceil(n / 256) - 1. Returns the largest of all. Of -0 and +0 it may be either. */
typedef float qsf_bucket_max_fn(const float *x, size_t n, float *out);

/* e[i] = x[i] < max ? exp((x[i] - max) * factor) : 1, and 0 where that is below `least`;
 * sums[s] = 16-lane sum of strip s of e. factor > 0, perhaps infinite. */
typedef void qsf_weigh_fn(const float *x, size_t n, float max, float factor, float least, float *e,
                          float *sums);

typedef struct qsf_kernels {
    const char *isa_name;
    /* By dtype; NULL where there is no such kernel. */
    qsf_matmul_fn *matmul[QSF_DTYPE_COUNT];       /* integer form; f32 form for f16 and f32 */
    qsf_matmul_fn *matmul_exact[QSF_DTYPE_COUNT]; /* f32 form */
    qsf_dequant_row_fn *dequant_row[QSF_DTYPE_COUNT];
    qsf_quantise_fn *quantise;
    qsf_rmsnorm_fn *rmsnorm;
    qsf_layernorm_fn *layernorm;
    qsf_rope_fn *rope_split;
    qsf_rope_fn *rope_interleaved;
    qsf_activation_fn *gelu_tanh;
    qsf_activation_fn *gelu_erf;
    qsf_activation_fn *silu;
    qsf_activation_fn *relu;
    qsf_activation_fn *relu_squared;
    qsf_silu_mul_fn *silu_mul;
    qsf_add_fn *add;
    qsf_kv_store_fn *k_store_f16;
    qsf_kv_store_fn *v_store_f16;
    qsf_kv_store_fn *k_store_f32;
    qsf_kv_store_fn *v_store_f32;
    qsf_attend_fn *attend_f16;
    qsf_attend_fn *attend_f32;
    qsf_all_finite_fn *all_finite;
    qsf_bucket_max_fn *bucket_max;
    qsf_weigh_fn *weigh;
} qsf_kernels;

/* Fills the table: scalar first, then each level that `isa` includes, best last. */
void qsf_kernels_init(qsf_kernels *k, qsf_isa isa);

/* Each of these sets only the pointers it has something better for. */
void qsf_kernels_fill_scalar(qsf_kernels *k);
#if QSF_ARCH_X86
void qsf_kernels_fill_avx2(qsf_kernels *k);
void qsf_kernels_fill_avxvnni(qsf_kernels *k);
void qsf_kernels_fill_avx512(qsf_kernels *k);
void qsf_kernels_fill_amx(qsf_kernels *k);
#endif
#if QSF_ARCH_ARM
void qsf_kernels_fill_neon(qsf_kernels *k);
void qsf_kernels_fill_dotprod(qsf_kernels *k);
#endif

#endif
