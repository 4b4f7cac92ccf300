/* dtype.h - the quantisation types: their ids, names and sizes (docs/format.md, section 5).
 *
 * A matrix is stored as tiles of 16 rows x 64 columns; this is the one place
 * that knows how many bytes a tile of each type takes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_BASE_DTYPE_H
#define QSF_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QSF_TILE_ROWS 16
#define QSF_BLOCK 64 /* columns of a tile; values that share one scale */

/* Where the parts of a tile lie: 16 scales, 16 mins in the types that have one, codes. */
#define QSF_TILE_SCALES_OFF 0
#define QSF_TILE_MINS_OFF 32
#define QSF_TILE_CODES_OFF(has_min) ((has_min) ? 64 : 32)

typedef enum qsf_dtype {
    QSF_DTYPE_2BIT_SYM = 0,
    QSF_DTYPE_2BIT = 1,
    QSF_DTYPE_3BIT = 2,
    QSF_DTYPE_4BIT = 3,
    QSF_DTYPE_TERNARY = 4,
    QSF_DTYPE_MIXED = 5, /* file and layer level only: never a tensor's */
    QSF_DTYPE_8BIT = 6,
    QSF_DTYPE_F16 = 7,
    QSF_DTYPE_F32 = 8,
    QSF_DTYPE_TERNARY_DENSE = 9,
    QSF_DTYPE_4BIT_SYM = 10,
    QSF_DTYPE_COUNT = 11
} qsf_dtype;

/* Never NULL; "unknown" for an id outside the table. */
const char *qsf_dtype_name(uint32_t dtype);

/* Bytes of one 16x64 tile; 0 for an id that no tensor may have. */
size_t qsf_dtype_tile_bytes(uint32_t dtype);

/* Bytes of one value of a plain vector: f16 2, f32 4, everything else 0. */
size_t qsf_dtype_scalar_bytes(uint32_t dtype);

/* Is a weight of this type code * scale + min, rather than a multiple of its scale? */
bool qsf_dtype_has_min(uint32_t dtype);

/* Are activations quantised to int8 before they meet weights of this type? */
bool qsf_dtype_is_quantised(uint32_t dtype);

#endif
