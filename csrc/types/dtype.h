/* dtype.h - the types of weights: their ids, names, sizes and forms (docs/format.md, section 5).
 *
 * A matrix is stored as tiles of 16 rows x 64 columns. Only table.h knows the size of a tile.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "types/table.h"

#define QSF_TILE_ROWS 16
#define QSF_BLOCK 64           /* columns of a tile */
#define QSF_MAX_STATE_DIM 256U /* of a key or a value of a recurrent state */

/* The scales of a tile with F16 scales are first: 16 scales, then 16 mins if the type has them. */
#define QSF_TILE_SCALES_OFF 0
#define QSF_TILE_MINS_OFF 32
#define QSF_TILE_CODES_OFF(has_min) ((has_min) ? 64 : 32)

#define QSF_DTYPE_OF(id, symbol, ...) QSF_DTYPE_##symbol = (id),
typedef enum qsf_dtype {
    QSF_CODED_TYPES(QSF_DTYPE_OF) QSF_FLOAT_TYPES(QSF_DTYPE_OF) QSF_DTYPE_MIXED =
        5, /* of a file or a layer, never of a tensor */
    QSF_DTYPE_COUNT = 25
} qsf_dtype;
#undef QSF_DTYPE_OF

/* The arrangement of the codes of a tile. */
typedef enum qsf_codes {
    QSF_CODES_NONE, /* values instead of codes */
    QSF_CODES_2BIT,
    QSF_CODES_3BIT,
    QSF_CODES_4BIT,
    QSF_CODES_5BIT, /* four bits as QSF_CODES_4BIT, then the highest ones */
    QSF_CODES_6BIT, /* the same, with two bits as QSF_CODES_2BIT */
    QSF_CODES_8BIT,
    QSF_CODES_TRITS,  /* five digits in base 3 a byte */
    QSF_CODES_E2M1,   /* floats of 4 bits, which lie as QSF_CODES_4BIT */
    QSF_CODES_LEVELS, /* numbers of QSF_LEVELS, which lie as QSF_CODES_4BIT */
    QSF_CODES_IQ4     /* the same of QSF_IQ4_LEVELS */
} qsf_codes;

/* From 4BIT on four tiles have them in common. */
typedef enum qsf_scales {
    QSF_SCALES_NONE,
    QSF_SCALES_F16,
    QSF_SCALES_E8M0, /* powers of two, a byte each */
    QSF_SCALES_4BIT, /* integers times an f16 for 256 columns; mins the same */
    QSF_SCALES_6BIT, /* the same */
    QSF_SCALES_8BIT  /* integers + 128, times an f16 for 256 columns */
} qsf_scales;

/* The properties of a type that kernels use. Literals after inlining, if the type is a literal. */
typedef struct qsf_form {
    const char *name;
    size_t tile_bytes;
    qsf_codes codes;
    qsf_scales scales;
    size_t scale_cols; /* columns that share a scale */
    bool has_min;
    int32_t zero;
    int32_t factor;
    float unit;
} qsf_form;

/* All zero for an id that no tensor may have; that includes QSF_DTYPE_MIXED, which has a name. */
static inline qsf_form qsf_form_of(uint32_t dtype)
{
#define QSF_CODED_FORM(id, symbol, function, label, bytes, codes, scales, cols, min, zero, factor, \
                       unit)                                                                       \
    [id] = {label, bytes, QSF_CODES_##codes, QSF_SCALES_##scales, cols, min, zero, factor, unit},
#define QSF_FLOAT_FORM(id, symbol, function, label, bytes) \
    [id] = {.name = label, .tile_bytes = bytes},
    static const qsf_form forms[QSF_DTYPE_COUNT] = {
        QSF_CODED_TYPES(QSF_CODED_FORM)
            QSF_FLOAT_TYPES(QSF_FLOAT_FORM)[QSF_DTYPE_MIXED] = {.name = "mixed"}};
#undef QSF_CODED_FORM
#undef QSF_FLOAT_FORM
    return forms[dtype < QSF_DTYPE_COUNT ? dtype : QSF_DTYPE_MIXED];
}

/* Never NULL; "unknown" for an id outside the table. */
static inline const char *qsf_dtype_name(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT ? qsf_form_of(dtype).name : "unknown";
}

/* Bytes of one 16x64 tile; 0 if no tensor may have this id. */
static inline size_t qsf_dtype_tile_bytes(uint32_t dtype)
{
    return qsf_form_of(dtype).tile_bytes;
}

/* True if activations are quantised to int8 before the product with weights of this type. */
static inline bool qsf_dtype_is_quantised(uint32_t dtype)
{
    return qsf_form_of(dtype).codes != QSF_CODES_NONE;
}

/* True if the kernels of this type take 8-bit activations; those of 8-bit codes take 16 bits. */
static inline bool qsf_dtype_has_coarse_acts(uint32_t dtype)
{
    return qsf_dtype_is_quantised(dtype) && qsf_form_of(dtype).codes != QSF_CODES_8BIT;
}

/* True if a weight is code * scale + min; false if it is a multiple of its scale. */
static inline bool qsf_dtype_has_min(uint32_t dtype)
{
    return qsf_form_of(dtype).has_min;
}

/* Bytes of one value of a vector: 2 for f16, 4 for f32, 0 for other types. */
static inline size_t qsf_dtype_scalar_bytes(uint32_t dtype)
{
    return qsf_dtype_is_quantised(dtype)
               ? 0
               : qsf_dtype_tile_bytes(dtype) / ((size_t)QSF_TILE_ROWS * QSF_BLOCK);
}

/* Bytes of the codes of a tile. */
static inline size_t qsf_code_bytes(qsf_codes codes)
{
    switch (codes) {
    case QSF_CODES_2BIT:
        return 256;
    case QSF_CODES_3BIT:
        return 384;
    case QSF_CODES_4BIT:
    case QSF_CODES_E2M1:
    case QSF_CODES_LEVELS:
    case QSF_CODES_IQ4:
        return 512;
    case QSF_CODES_5BIT:
        return 640;
    case QSF_CODES_6BIT:
        return 768;
    case QSF_CODES_8BIT:
        return 1024;
    case QSF_CODES_TRITS:
        return 208;
    case QSF_CODES_NONE:
        break;
    }
    return 0;
}

/* True if codes lie as QSF_CODES_4BIT. */
static inline bool qsf_are_nibbles(qsf_codes codes)
{
    return codes == QSF_CODES_4BIT || codes == QSF_CODES_E2M1 || codes == QSF_CODES_LEVELS ||
           codes == QSF_CODES_IQ4;
}

/* Where the codes of a group of four columns lie, in planes of 64 bytes (16 rows x 4 columns): a
 * code is plane >> shift & mask, and above that high_plane << 4 >> high_shift & high_mask, unless
 * high_mask is 0. */
typedef struct qsf_code_place {
    unsigned plane;
    unsigned shift;
    unsigned mask;
    unsigned high_plane;
    unsigned high_shift;
    unsigned high_mask;
} qsf_code_place;

/* Not of QSF_CODES_TRITS */
static inline qsf_code_place qsf_code_place_of(qsf_codes codes, size_t group)
{
    const unsigned g = (unsigned)group;
    if (codes == QSF_CODES_2BIT)
        return (qsf_code_place){g % 4, g / 4 * 2, 3, 0, 0, 0};
    if (codes == QSF_CODES_3BIT)
        return (qsf_code_place){g % 4, g / 4 * 2, 3, 4 + g % 4 / 2, g % 2 * 4 + g / 4 + 2, 4};
    if (codes == QSF_CODES_5BIT)
        return (qsf_code_place){g % 8, g / 8 * 4, 15, 8 + g % 2, g / 2, 16};
    if (codes == QSF_CODES_6BIT)
        return (qsf_code_place){g % 8, g / 8 * 4, 15, 8 + g % 4, g / 4 * 2, 48};
    if (codes == QSF_CODES_8BIT)
        return (qsf_code_place){g, 0, 255, 0, 0, 0};
    return (qsf_code_place){g % 8, g / 8 * 4, 15, 0, 0, 0};
}

/* Tiles of a group, whose scales lie together before the codes of all of them; a row has whole
 * groups. */
static inline size_t qsf_tiles_per_head(qsf_form form)
{
    return form.scales >= QSF_SCALES_4BIT ? 4 : 1;
}

/* Offset of the codes of a tile, or of the tiles of a group, after the scales and mins. */
static inline size_t qsf_codes_off(qsf_form form)
{
    return qsf_tiles_per_head(form) * (form.tile_bytes - qsf_code_bytes(form.codes));
}
