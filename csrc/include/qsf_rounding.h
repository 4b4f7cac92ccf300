/* qsf_rounding.h - part of qsf.h: rounding matrices to tiles and packing, for converters. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ROUNDING_H
#define QSF_ROUNDING_H

#include "qsf_library.h"

QSF_C_BEGIN

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

#define QSF_RULE_SEARCH 0  /* search for the scales and mins with the least squared error */
#define QSF_RULE_NEAREST 1 /* scales from the range, or from the largest magnitude */
#define QSF_RULE_SCALE 2   /* ternary types: the same given scale for all blocks */

/* How a matrix is rounded (docs/format.md, section 5). */
typedef struct qsf_rounding {
    uint32_t dtype;       /* id of a tensor type */
    uint32_t rule;        /* QSF_RULE_*; ignored for f16 and f32 */
    float scale;          /* for QSF_RULE_SCALE: 0 .. 65504, rounded to f16 */
    const float *weights; /* [n_cols]: weight of a column's squared error, finite and >= 0. NULL:
                           * equal weights. A block whose weights are all 0 has equal weights */
} qsf_rounding;

/* Sums over all values, which describe the rounding error. */
typedef struct qsf_rounding_sums {
    uint64_t n_values;
    uint64_t bad_row; /* after QSF_ERR_NUMERIC: first row of the tile that has NaN or infinity */
    double squared_error; /* (source - stored)^2 */
    double source_energy; /* source^2 */
    double stored_energy; /* stored^2 */
    double inner_product; /* source * stored */
    double max_error;     /* largest |source - stored| */
} qsf_rounding_sums;

/* Rounds rows [n_rows, n_cols] and writes them as tiles. cap_bytes is at least
 * ceil(n_rows / 16) * ceil(n_cols / 64) * bytes of a tile. stored [n_rows, n_cols], unless NULL,
 * receives the rounded values. The bits depend neither on the instruction set nor on how the
 * matrix is split into calls, if each call but the last has a multiple of 16 rows. Any number of
 * threads may call at the same time.
 * QSF_ERR_NUMERIC: a value is NaN, infinite, or too large for a scale or min of the type. */
QSF_API qsf_status qsf_quantise_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                                     size_t n_cols, void *tiles, size_t cap_bytes, float *stored,
                                     qsf_rounding_sums *sums);

/* Returns the number of floats that qsf_feedback_rows() needs as `work`; 0 if n_cols is more than
 * a matrix may have. */
QSF_API size_t qsf_feedback_work_floats(size_t n_cols);

/* Rounds like qsf_quantise_rows(), but one column after another: later columns compensate for the
 * error of earlier ones (GPTQ, Frantar et al. 2022). order [n_cols] is a permutation of the columns
 * that keeps the columns of each block of 64 together. factor [n_cols, n_cols], in that order, is
 * the upper triangular U with U^T U = the inverse of the damped second moments of the inputs;
 * values below the diagonal are ignored. work [cap_floats] is scratch memory. The sums compare
 * with `rows`. QSF_ERR_ARG: order repeats or omits an index or splits a block, a diagonal element
 * is not above 0, or the type is not quantised.
 * QSF_ERR_NUMERIC: as for qsf_quantise_rows(), or the values grew too large: use more damping. */
QSF_API qsf_status qsf_feedback_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                                     size_t n_cols, const float *factor, const int32_t *order,
                                     float *work, size_t cap_floats, void *tiles, size_t cap_bytes,
                                     float *stored, qsf_rounding_sums *sums);

/* Writes rows of GGUF blocks as tiles of the same type, 12 .. 19, 21 .. 24: its codes and scales in
 * another order. stored [n_rows, bytes of a row]; n_cols is whole blocks; tiles as for
 * qsf_quantise_rows(), and four blocks of columns together where they have a scale in common. Any
 * number of threads may call. QSF_ERR_ARG: another type, a part of a block, or cap_bytes too few.
 */
QSF_API qsf_status qsf_repack_rows(uint32_t dtype, const void *stored, size_t n_rows, size_t n_cols,
                                   void *tiles, size_t cap_bytes);

/* Packs raw_bytes as one LZ4 block without a size in front, by LZ4-HC if level is 1 .. 12, and
 * returns its bytes; 0 if it has more than cap_bytes. Any number of threads may call. */
QSF_API size_t qsf_lz4_pack(const void *raw, size_t raw_bytes, int32_t level, void *packed,
                            size_t cap_bytes);

/* Unpacks such a block into exactly raw_bytes. QSF_ERR_FORMAT: it is damaged. */
QSF_API qsf_status qsf_lz4_unpack(const void *packed, size_t packed_bytes, void *raw,
                                  size_t raw_bytes);

/* ---- cdef end ---- */

QSF_C_END

#endif
