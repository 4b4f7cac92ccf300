/* dtype.h - the quantisation types: their ids, names and sizes (docs/format.md, section 5).
 *
 * A matrix is stored as tiles of 16 rows x 64 columns. Only this file knows the size of a tile.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_BASE_DTYPE_H
#define QSF_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QSF_TILE_ROWS 16
#define QSF_BLOCK 64     /* columns of a tile; weights that share one scale */
#define QSF_SUB_BLOCK 32 /* weights that share one scale in MXFP4 */

/* Offsets in a tile: 16 scales, then 16 mins if the type has them, then codes. MXFP4 has a scale of
 * one byte for each 32 columns: 16 for the first, then 16 for the others. */
#define QSF_TILE_SCALES_OFF 0
#define QSF_TILE_MINS_OFF 32
#define QSF_TILE_CODES_OFF(has_min) ((has_min) ? 64 : 32)

typedef enum qsf_dtype {
    QSF_DTYPE_2BIT_SYM = 0,
    QSF_DTYPE_2BIT = 1,
    QSF_DTYPE_3BIT = 2,
    QSF_DTYPE_4BIT = 3,
    QSF_DTYPE_TERNARY = 4,
    QSF_DTYPE_MIXED = 5, /* of a file or a layer, never of a tensor */
    QSF_DTYPE_8BIT = 6,
    QSF_DTYPE_F16 = 7,
    QSF_DTYPE_F32 = 8,
    QSF_DTYPE_TERNARY_DENSE = 9,
    QSF_DTYPE_4BIT_SYM = 10,
    QSF_DTYPE_MXFP4 = 11,
    QSF_DTYPE_COUNT = 12
} qsf_dtype;

/* Never NULL; "unknown" for an id outside the table. */
const char *qsf_dtype_name(uint32_t dtype);

/* Bytes of one 16x64 tile; 0 if no tensor may have this id. Inline, because loops over tiles are
 * shorter if it is a literal. 16 rows x (2 bytes of scale [+ 2 of min] + 64 codes); ternary-dense
 * stores 64 codes in 13 bytes: five codes a byte. */
static inline size_t qsf_dtype_tile_bytes(uint32_t dtype)
{
    return dtype == QSF_DTYPE_2BIT_SYM        ? 288
           : dtype == QSF_DTYPE_2BIT          ? 320
           : dtype == QSF_DTYPE_3BIT          ? 448
           : dtype == QSF_DTYPE_4BIT          ? 576
           : dtype == QSF_DTYPE_TERNARY       ? 288
           : dtype == QSF_DTYPE_8BIT          ? 1056
           : dtype == QSF_DTYPE_F16           ? 2048
           : dtype == QSF_DTYPE_F32           ? 4096
           : dtype == QSF_DTYPE_TERNARY_DENSE ? 240
           : dtype == QSF_DTYPE_4BIT_SYM      ? 544
           : dtype == QSF_DTYPE_MXFP4         ? 544
                                              : 0;
}

/* Bytes of one value of a vector: 2 for f16, 4 for f32, 0 for other types. */
size_t qsf_dtype_scalar_bytes(uint32_t dtype);

/* True if a weight is code * scale + min; false if it is a multiple of its scale. */
bool qsf_dtype_has_min(uint32_t dtype);

/* True if activations are quantised to int8 before the product with weights of this type. */
bool qsf_dtype_is_quantised(uint32_t dtype);

#endif
