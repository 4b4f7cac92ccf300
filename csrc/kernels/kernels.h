/* kernels.h - the table of inner loops: the contract of each kernel.
 *
 * A kernel is pure: it does not allocate, use threads or files, or fail. Every instruction set
 * gives the same bits as scalar, because each contract fixes the order of floating-point operations
 * (integer sums are exact and may be reordered). Every multiply-add is an explicit fmaf.
 *
 * "16-lane sum" below means: lane l = 0..15 starts at +0 and accumulates elements
 * l, l+16, l+32, ... in that order (missing ones count as zero); then lanes are added: l += l+8, l
 * += l+4, l += l+2, l += l+1.
 *
 * Buffers need no alignment. They do not overlap unless the contract allows it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "platform/cpu.h"
#include "types/dtype.h"

#define QSF_KV_PAGE_TOKENS 32

/* Parts of a block of activations, for types whose scales are of fewer than 64 columns. */
typedef struct qsf_act_parts {
    float scale[2];     /* of each 32 columns */
    int16_t quarter[4]; /* sums of q, by 16 columns */
    int32_t first_fine; /* sum of 256 * q + q_low of the first 32 columns */
} qsf_act_parts;

/* The activations of n_tokens tokens, in both forms. Columns are padded with zeros to n_blocks *
 * 64. */
typedef struct qsf_acts {
    size_t n_tokens;
    size_t n_blocks;
    const float *f32;           /* [n_tokens, n_blocks * 64]; NULL: only the integer form is used */
    const int8_t *q;            /* [n_tokens, n_blocks * 64]; -127..127 where q_low is used */
    const int8_t *q_low;        /* [n_tokens, n_blocks * 64]: x is near scale * (q + q_low / 256) */
    const float *scale;         /* [n_tokens, n_blocks]; parts have their own */
    const int32_t *sum;         /* [n_tokens, n_blocks], sum of the block's q */
    const qsf_act_parts *parts; /* [n_tokens, n_blocks] */
    const float *scaled_sum;    /* [n_tokens, n_blocks], scale * (float)sum */
    const int32_t *fine_sum;    /* [n_tokens, n_blocks], sum of the block's 256 * q + q_low */
} qsf_acts;

/* Destination of the integers of one token's activations; as in qsf_acts, without n_tokens. */
typedef struct qsf_act_row {
    int8_t *q;
    int8_t *q_low;
    float *scale;
    int32_t *sum;
    qsf_act_parts *parts;
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
 *   whose scale is of 32 or 16 columns, the same for each of these parts of a block, ascending;
 *   x_scale is that of the part's 32 columns.
 *   With a min: acc = fmaf(w_min, x_scale * (float)(sum of the part's q), acc). Of MXFP4 the value
 *   is that of the code, times 2, and the scale is halved. Scales of integers: w_scale = d *
 * integer, w_min = -d_min * integer, both exact. 8-bit codes, with 16-bit activations (their
 * rounding would otherwise exceed the weights'): dot = exact integer sum of (code - 128) * (256 * q
 * + q_low), below 2^28 acc = fmaf((float)dot, w_scale * (x_scale * 2^-8), acc) f32 form (f16 and
 * f32 weights, and every type when exact), columns c ascending: acc = fmaf(w[r][c], x[c], acc)
 * where a quantised w is fmaf((float)code, scale, min) with a min; without, the value of its code
 * times the scale, rounded once.
 *
 * All bytes are valid codes: a ternary code of 3 has value 2, and trit k = 0..4 of a dense byte is
 * ((byte * 3^k mod 256) * 3) >> 8, whatever the byte. */
typedef void qsf_matmul_fn(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x,
                           float *y, size_t y_stride);

/* Adds the sparse outliers of a tile row to its products: for each token t and each entry in its
 * order, of row r, column c and delta d,
 *   y[t * y_stride + r] = fmaf(d, x->f32[t][c], y[t * y_stride + r])
 * The entries are as in the file (docs/format.md, section 5) and have been checked against
 * n_rows (1 .. 16) and the columns of x. */
typedef void qsf_add_outliers_fn(const unsigned char *entries, size_t n_entries, size_t n_rows,
                                 const qsf_acts *x, float *y, size_t y_stride);

/* Adds what an adapter of low rank makes of z [n_tokens, z_stride]: for each token t and row r of
 * n_rows, with acc from +0 over k = 0 .. rank - 1 ascending,
 *   acc = fmaf(b[r / 16][k][r % 16], z[t * z_stride + k], acc), then
 *   y[t * y_stride + r] = fmaf(scale[r], acc, y[t * y_stride + r])
 * b: f16 [tile rows, rank, 16], scale 1; or is_8bit: for each tile row f16 scale [16], then u8
 * [rank, 16], each the number plus 128 */
typedef void qsf_add_low_rank_fn(const unsigned char *b, bool is_8bit, size_t rank, size_t n_rows,
                                 const float *z, size_t z_stride, size_t n_tokens, float *y,
                                 size_t y_stride);

/* Decodes row `row_in_tile` of a tile row to f32: out [n_blocks * 64]. Values as in the f32
 * form. */
typedef void qsf_dequant_row_fn(const unsigned char *tiles, size_t n_blocks, size_t row_in_tile,
                                float *out);

/* x [n_blocks * 64] to integers, per block, or by_halves per 32 columns: a large value then makes
 * only 31 others coarse. For weights whose own scales are of so few columns; the scale of a block
 * is then that of its first half. Both scales of parts are that of the block if it has one.
 * amax = largest |x|; scale = amax / 127;
 * fine = rint(x * (32512 / amax)), ties to even, 32512 = 127 * 256; q = fine / 256 rounded
 * to nearest (halves up), q_low = fine - 256 * q. All zero when amax is below 2^-112
 * (32512 / amax would overflow) or not finite. A NaN in the block makes amax NaN, and so the
 * scale and every sum that uses the block; an infinity does the same when it is multiplied by
 * a zero. */
#define QSF_QUANTISE_MIN 0x1p-112F

typedef void qsf_quantise_fn(const float *x, size_t n_blocks, bool by_halves,
                             const qsf_act_row *out);

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

/* Activation functions, in place on x [n]; built on the table's exp (vecops.h). silu_clamped:
 * g / (1 + e^(-1.702 g)), g = min(x, 7) */
typedef void qsf_activation_fn(float *x, size_t n);

/* gate[i] = activation(gate[i]) * up[i]; with silu_clamped, up[i] is clamped to -7 .. 7, and 1 is
 * added to it; sigmoid_mul: gate[i] = up[i] / (1 + e^-gate[i]) */
typedef void qsf_gated_fn(float *gate, const float *up, size_t n);

/* Activation xIELU: x > 0: by[0] x^2 + by[2] x, else by[1] (e^x - 1 - x) + by[2] x */
typedef void qsf_xielu_fn(float *x, const float *by, size_t n);

/* a * b + c, as the compiler makes it: rounded twice, unless it fuses products with sums */
typedef float qsf_sum_of_product_fn(float a, float b, float c);

/* x[i] += y[i] */
typedef void qsf_add_fn(float *x, const float *y, size_t n);

/* x[i] = fmaf(factor, y[i], x[i]) */
typedef void qsf_add_scaled_fn(float *x, const float *y, float factor, size_t n);

/* x[i] *= factor */
typedef void qsf_scale_fn(float *x, float factor, size_t n);

/* x[i] becomes -limit if it is below, limit if it is above; NaN stays. limit >= 0 */
typedef void qsf_clamp_fn(float *x, float limit, size_t n);

/* x[i] *= y[i] */
typedef void qsf_mul_fn(float *x, const float *y, size_t n);

/* x[i] = cap * tanh(x[i] * factor): of scores and of logits. tanh: exp_tmpl.h. */
typedef void qsf_cap_fn(float *x, float factor, float cap, size_t n);

/* ---- recurrent mixers ---- */

/* A row of a causal convolution by channels, n of them: out[i] = sum (+ bias[i] unless NULL), where
 * sum goes from +0 over the taps t ascending: sum = fmaf(w[t * w_stride + i], rows[t][i], sum). */
typedef void qsf_conv_fn(const float *const *rows, const float *w, size_t w_stride, size_t n_taps,
                         const float *bias, float *out, size_t n);

/* x[i] = x[i] * (1 / sqrt(s + eps)) * factor, rounded after each multiplication; s = 16-lane sum of
 * fmaf(x, x, lane) */
typedef void qsf_l2norm_fn(float *x, float eps, float factor, size_t n);

/* beta[i] = factor / (1 + exp(-beta[i])) */
typedef void qsf_betas_fn(float *beta, float factor, size_t n);

/* decay[i] = exp(-(rate[i] * softplus(decay[i] + bias[i]))); softplus: recur_tmpl.h */
typedef void qsf_decays_fn(float *decay, const float *rate, const float *bias, size_t n);

/* decay[i] = exp(-limit / (1 + exp(-(rate[i] * (decay[i] + bias[i]))))) */
typedef void qsf_bounded_decays_fn(float *decay, const float *rate, const float *bias, float limit,
                                   size_t n);

/* Of SSD: step[i] = softplus(step[i] + bias[i]); decay[i] = exp(-(rate[i] * step[i])) */
typedef void qsf_ssd_gates_fn(float *step, float *decay, const float *rate, const float *bias,
                              size_t n);

/* The state of a head of the gated delta rule is [key_dim, value_dim], in blocks [key_dim, 32] of
 * columns; columns after value_dim are +0. For rows t ascending and each column j of a block:
 *   r = 0; for i ascending: r = fmaf(decay[i] * k[i], s[i][j], r)
 *   d = (v[j] - r) * beta
 *   s[i][j] = fmaf(k[i], d, decay[i] * s[i][j])
 *   o[j] = 0; for i ascending: o[j] = fmaf(q[i], s[i][j], o[j])
 * v[j] becomes d. A replay makes s of k, of d in the place of v, and of decay alone. All i have one
 * decay, unless there is one for each channel.
 *
 * The rule of SSD is the same with r = 0 and d = v[j] * beta, and then o[j] = fmaf(skip, v, o[j])
 * of v as it was. */
#define QSF_STATE_COLS 32

typedef struct qsf_state_rows {
    size_t n_rows; /* 1 or more; rows of q, k and v are `stride` floats apart */
    size_t key_dim;
    size_t n_cols;  /* 1 .. 32 of the block */
    const float *q; /* [key_dim] */
    const float *k; /* [key_dim] */
    float *v;       /* [n_cols] */
    size_t stride;
    float *o; /* [n_cols] */
    size_t o_stride;
    const float *beta;  /* one number a row, gate_stride floats apart */
    const float *decay; /* the same, or [key_dim] a row */
    size_t gate_stride;
    bool has_channel_decays; /* never of SSD */
    float skip;              /* of SSD */
} qsf_state_rows;

typedef void qsf_state_rule_fn(float *state, const qsf_state_rows *x);

/* ---- KV pages and attention ----
 *
 * A page holds 32 positions ("slots") of one KV head, head_dim padded to n_blocks * 64; types
 * f32, f16, 8bit, 4bit and 2bit.
 *   K page: [2, n_blocks] tiles of docs/format.md, section 5, with positions as rows. So scores
 *     are a matmul with 2 tile rows for each page, and its "tokens" are the query heads of the
 *     KV head.
 *   V page: n_blocks blocks of 64 dims. f32, f16: [32, 64] values. Else 32 scales f16, 32 mins
 *     f16 if the type has them, [32, bytes of 64 codes]; 8 bits: byte i is dim i; 4 bits: the
 *     nibbles of byte i are dims i, i + 32, low first; 2 bits: bits 2b, 2b + 1 of byte i are
 *     dim i + 16 b.
 * Codes have values as in weights: fmaf((float)code, scale, min), or (code - 128) * scale.
 *
 * Attention computes spans of 256 positions; position p is always in span p / 256. A query row
 * attends to positions [first, end). In each span that contains some of them:
 *   s[p] = (matmul of the query row and K) * scale, where `scale` is the model's
 *   max = largest s[p]; e[p] = exp(s[p] - max)
 *   total = 16-lane sum of e by p (lane p % 16)
 *   f32, f16: values[d] = over p ascending, from +0: fmaf(e[p], v[p][d], acc)
 *   codes, per block of 64 dims, with the scale and the min of position p (no min: 0):
 *     w[p] = e[p] * scale[p]; amax = largest |w|
 *     fine[p] = rint(w[p] * (32512 / amax)), ties to even, or 0 as in qsf_quantise_fn
 *     dot = exact integer sum of code * fine[p], with code - 128 for 8 bits
 *     start = 16-lane sum of fmaf(e[p], min[p], lane)
 *     values[d] = fmaf((float)dot, amax / 32512, start)
 * Spans are merged in ascending order. The first is taken unchanged; then, with new = larger max:
 *   a = exp(max - new), b = exp(next max - new)
 *   total = fmaf(next total, b, total * a), values[d] = fmaf(next values[d], b, values[d] * a)
 * and at the end out[d] = values[d] * (1 / total).
 *
 * A model may change this in three ways. A caller that does none of them pays nothing.
 *   cap: qsf_cap_fn replaces the scores of the range, with factor = scale / cap; then span_softmax
 *     with scale 1.
 *   ALiBi: qsf_alibi_fn does so with `scale`; then span_softmax with scale 1.
 *   sink: a position before all others with a score and without a value. qsf_span_sink_fn adds it
 *     to the result of a row's first span.
 * No operation depends on other rows, spans or
 * threads, so neither do the bits. Slots outside [first, end) are never part of a sum. */
#define QSF_KV_SPAN_TOKENS 256
#define QSF_KV_SPAN_PAGES (QSF_KV_SPAN_TOKENS / QSF_KV_PAGE_TOKENS)

/* Returns the bytes of a block of 64 dims of a V page; 0 for a type that pages do not have. */
size_t qsf_kv_value_block_bytes(qsf_dtype dtype);

/* Stores x [head_dim] of one position into slot `slot` of a K page or a V page. f16: rounded
 * to nearest even. Else per block of 64, from the values that are not padding:
 *   4, 2 bits: min = f16(lowest); scale = (highest - min) / 15 or 3, at least 0, rounded up to
 *     an f16; code = rint((x - min) / scale), in 0 .. 15 or 0 .. 3 (0 if the scale is 0)
 *   8 bits: scale = largest |x| / 127, rounded up to an f16; code = 128 + rint(x / scale)
 *     (128 if the scale is 0)
 * A block with a NaN or an infinity, or whose scale or min does not fit f16, gets the scale NaN,
 * min 0 and codes 0. Padding is stored as codes 0, or zeros. Other slots do not change. */
typedef void qsf_kv_store_fn(const float *x, size_t head_dim, size_t slot, void *page);

/* Rotates x [n] in place, n up to 4096, by blocks: the largest power of two that n holds, then the
 * largest that the rest holds, down to 16 (80 = 64 + 16). Fewer than 16 values at the end stay as
 * they are. A block of m values is transformed by Walsh and Hadamard, orthonormally: for h = 1, 2,
 * 4 .. m / 2, pairs (i, i + h) with i & h == 0: (a + b, a - b); then each value times
 * 1 / sqrtf(m). */
typedef void qsf_hadamard_fn(float *x, size_t n);

/* The slots of a span that a query row attends to: 0 <= begin < end <= 256, or begin == end if
 * there are none. */
typedef struct qsf_span_range {
    uint32_t begin;
    uint32_t end;
} qsf_span_range;

typedef struct qsf_span_sums {
    float max;
    float total;
} qsf_span_sums;

/* Replaces the scores [n_rows, 256] of query rows inside their ranges by e. The other scores become
 * undefined, and so do the sums of rows whose range is empty. */
typedef void qsf_span_softmax_fn(float *scores, const qsf_span_range *ranges, size_t n_rows,
                                 float scale, qsf_span_sums *sums);

/* scores[i] = fmaf(-slope, (float)(distance - i), scores[i] * scale), where distance, below 2^24,
 * is that of scores[0] from the position of the query; n <= distance + 1 */
typedef void qsf_alibi_fn(float *scores, float scale, float slope, uint32_t distance, size_t n);

/* A block of 64 dims of the values of a span: of V pages, or of K pages that have them */
typedef struct qsf_value_blocks {
    const unsigned char *pages[QSF_KV_SPAN_PAGES]; /* the block, or the first of its two tiles */
    size_t tile_step; /* of K pages: bytes from the first tile to the second; else 0 */
} qsf_value_blocks;

/* Adds the slots of `ranges` [n_rows], in ascending order, to values [n_rows, 64], rows `stride`
 * floats apart, which are zeros before the first. e [n_rows, 256], blocks: f32 or f16. Does not
 * read blocks that are in no range. */
typedef void qsf_add_values_fn(const qsf_value_blocks *blocks, const float *e,
                               const qsf_span_range *ranges, size_t n_rows, float *values,
                               size_t stride);

/* A block of 64 dims of the values of a span that are codes: tiles of 8 bits with dims as rows and
 * positions as columns, codes [dims / 16, positions / 64], and codes of fewer bits plus 128. Only
 * the requested positions are filled. */
typedef struct qsf_value_tiles {
    _Alignas(64) unsigned char codes[QSF_BLOCK / QSF_TILE_ROWS][QSF_KV_SPAN_TOKENS / QSF_BLOCK]
                                    [QSF_TILE_ROWS * QSF_BLOCK];
    _Alignas(64) float scale[QSF_KV_SPAN_TOKENS];
    float min[QSF_KV_SPAN_TOKENS];
} qsf_value_tiles;

/* Reads the blocks that `range` meets. */
typedef void qsf_value_tiles_fn(const qsf_value_blocks *blocks, qsf_span_range range,
                                qsf_value_tiles *tiles);

/* Weights of the values for some rows, by 64 positions: fine = 256 * q + q_low */
#define QSF_VALUE_ROWS 16
typedef struct qsf_value_weights {
    _Alignas(64) int8_t q[QSF_KV_SPAN_TOKENS / QSF_BLOCK][QSF_VALUE_ROWS][QSF_BLOCK];
    int8_t q_low[QSF_KV_SPAN_TOKENS / QSF_BLOCK][QSF_VALUE_ROWS][QSF_BLOCK];
    int32_t fine_sum[QSF_VALUE_ROWS];
    float factor[QSF_VALUE_ROWS]; /* amax / 32512 */
    float start[QSF_VALUE_ROWS];
} qsf_value_weights;

/* Computes the weights of n_rows rows, at most 16; e [n_rows, 256]. parts, not empty: which 64s of
 * positions; the ranges are inside. */
typedef void qsf_value_weights_fn(const float *e, const qsf_span_range *ranges, size_t n_rows,
                                  qsf_span_range parts, const qsf_value_tiles *tiles,
                                  qsf_value_weights *out);

/* values [n_rows, 64], rows `stride` floats apart, n_rows <= 16, over the same parts */
typedef void qsf_value_products_fn(const qsf_value_tiles *tiles, const qsf_value_weights *weights,
                                   qsf_span_range parts, size_t n_rows, float *values,
                                   size_t stride);

/* Merges the next span of a row into the earlier ones. n: a multiple of 16 */
typedef void qsf_span_merge_fn(qsf_span_sums *sums, float *values, const qsf_span_sums *next_sums,
                               const float *next_values, size_t n);

/* Adds a sink to the first span of a row; with new = max > sink ? max : sink:
 *   a = exp(sink - new), b = exp(max - new), total = fmaf(total, b, a), values[d] *= b
 * n: a multiple of 16 */
typedef void qsf_span_sink_fn(qsf_span_sums *sums, float *values, float sink, size_t n);

/* out [n] = values [n] * (1 / total) */
typedef void qsf_span_normalise_fn(const qsf_span_sums *sums, const float *values, size_t n,
                                   float *out);

/* For sampling from the vocabulary. x [n] has no NaN unless the contract allows it. Strip s is
 * elements 256 s .. 256 s + 255; bucket 16 s + l is those of them with index l modulo 16. To find
 * the few largest of n, search only buckets whose maximum is large enough. */
#define QSF_STRIP 256
#define QSF_STRIP_BUCKETS 16

/* out[b] = largest x of bucket b (-infinity if it is empty), for all buckets of strips 0 .. ceil(n
 * / 256) - 1; *max = the largest of all. Of -0 and +0 it may choose either. Returns true if no x is
 * infinite or NaN; with a NaN the maxima are undefined. */
typedef bool qsf_bucket_max_fn(const float *x, size_t n, float *out, float *max);

/* e[i] = x[i] < max ? exp((x[i] - max) * factor) : 1, but 0 if that is below `least`; sums[s] =
 * 16-lane sum of strip s of e. factor > 0, may be infinite. */
typedef void qsf_weigh_fn(const float *x, size_t n, float max, float factor, float least, float *e,
                          float *sums);

/* The kernels of all instruction sets over lanes, X(type, name): the last of them that is filled is
 * the best. */
#define QSF_VECTOR_KERNELS(X)                \
    X(qsf_add_outliers_fn, add_outliers)     \
    X(qsf_add_low_rank_fn, add_low_rank)     \
    X(qsf_quantise_fn, quantise)             \
    X(qsf_rmsnorm_fn, rmsnorm)               \
    X(qsf_layernorm_fn, layernorm)           \
    X(qsf_rope_fn, rope_split)               \
    X(qsf_rope_fn, rope_interleaved)         \
    X(qsf_activation_fn, gelu_tanh)          \
    X(qsf_activation_fn, gelu_erf)           \
    X(qsf_activation_fn, silu)               \
    X(qsf_activation_fn, relu)               \
    X(qsf_activation_fn, relu_squared)       \
    X(qsf_activation_fn, silu_clamped)       \
    X(qsf_xielu_fn, xielu)                   \
    X(qsf_gated_fn, gelu_tanh_mul)           \
    X(qsf_gated_fn, gelu_erf_mul)            \
    X(qsf_gated_fn, silu_mul)                \
    X(qsf_gated_fn, relu_mul)                \
    X(qsf_gated_fn, relu_squared_mul)        \
    X(qsf_gated_fn, silu_clamped_mul)        \
    X(qsf_add_fn, add)                       \
    X(qsf_add_scaled_fn, add_scaled)         \
    X(qsf_scale_fn, scale)                   \
    X(qsf_clamp_fn, clamp)                   \
    X(qsf_cap_fn, cap)                       \
    X(qsf_mul_fn, mul)                       \
    X(qsf_gated_fn, sigmoid_mul)             \
    X(qsf_conv_fn, conv)                     \
    X(qsf_l2norm_fn, l2norm)                 \
    X(qsf_betas_fn, betas)                   \
    X(qsf_decays_fn, decays)                 \
    X(qsf_bounded_decays_fn, bounded_decays) \
    X(qsf_ssd_gates_fn, ssd_gates)           \
    X(qsf_state_rule_fn, delta_rule)         \
    X(qsf_state_rule_fn, ssd_rule)           \
    X(qsf_state_rule_fn, state_replay)       \
    X(qsf_value_weights_fn, value_weights)   \
    X(qsf_alibi_fn, alibi)                   \
    X(qsf_span_softmax_fn, span_softmax)     \
    X(qsf_span_sink_fn, span_sink)           \
    X(qsf_span_merge_fn, span_merge)         \
    X(qsf_span_normalise_fn, span_normalise) \
    X(qsf_hadamard_fn, hadamard)             \
    X(qsf_bucket_max_fn, bucket_max)         \
    X(qsf_weigh_fn, weigh)                   \
    X(qsf_sum_of_product_fn, sum_of_product)

typedef struct qsf_kernels {
    const char *isa_name;
#define QSF_FIELD(type, name) type *name;
    QSF_VECTOR_KERNELS(QSF_FIELD)
#undef QSF_FIELD
    /* By dtype; NULL if there is no such kernel. */
    qsf_matmul_fn *matmul[QSF_DTYPE_COUNT];       /* integer form; f32 form for f16 and f32 */
    qsf_matmul_fn *matmul_exact[QSF_DTYPE_COUNT]; /* f32 form */
    qsf_dequant_row_fn *dequant_row[QSF_DTYPE_COUNT];
    qsf_kv_store_fn *k_store[QSF_DTYPE_COUNT]; /* NULL if pages do not have the type */
    qsf_kv_store_fn *v_store[QSF_DTYPE_COUNT];
    qsf_add_values_fn *add_values[QSF_DTYPE_COUNT];   /* of f32 and f16 */
    qsf_value_tiles_fn *value_tiles[QSF_DTYPE_COUNT]; /* of the other types of pages */
    qsf_value_products_fn *value_products;
} qsf_kernels;

/* Fills the table: scalar first, then each instruction set that `isa` includes, the best last. */
void qsf_kernels_init(qsf_kernels *k, qsf_isa isa);

/* QSF_ERR_UNSUPPORTED where the compiler fused products with sums, so that bits would differ. */
qsf_status qsf_kernels_check_rounding(const qsf_kernels *k);

/* Each sets only the pointers for which it has a better kernel. */
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
void qsf_kernels_fill_i8mm(qsf_kernels *k);
#endif

/* ---- the values of a span, of every type of V pages ---- */

/* Returns the range from the first slot that any row attends to, to the last; begin >= end if there
 * are none. */
qsf_span_range qsf_union_of_ranges(const qsf_span_range *ranges, size_t n_rows);

/* Lays out the values of a range if they are codes. Reads the blocks that the range meets. */
void qsf_span_values_prepare(const qsf_kernels *k, qsf_dtype dtype, const qsf_value_blocks *blocks,
                             qsf_span_range range, qsf_value_tiles *tiles);

/* Computes values [n_rows, 64], rows `stride` floats apart, as the contract of attention in
 * kernels.h says. e [n_rows, 256]; ranges inside `all`, which is prepared from these blocks. */
void qsf_span_values(const qsf_kernels *k, qsf_dtype dtype, const qsf_value_blocks *blocks,
                     const qsf_value_tiles *tiles, qsf_span_range all, const float *e,
                     const qsf_span_range *ranges, size_t n_rows, float *values, size_t stride);
