/* part_scales.h - the scales and mins of types whose scales are of fewer than 64 columns, as lanes.
 *
 * Included inside a target region, after a lanes_*.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/half.h"
#include "kernels/forced_inline.h"

#define QSF_HEAD_PARTS 16 /* most parts of the tiles of a head */

/* Scales and mins of the parts of a head's tiles, by ascending column; E8M0 scales are halved. */
typedef struct part_scales {
    lanes scale[QSF_HEAD_PARTS];
    lanes min[QSF_HEAD_PARTS];
} part_scales;

/* The scales of the 16 rows of part `part` of a tile of E8M0, halved */
QSF_FORCED_INLINE lanes load_half_scales(const unsigned char *tile, size_t part)
{
    float scales[QSF_TILE_ROWS];
    for (size_t r = 0; r < QSF_TILE_ROWS; r++)
        scales[r] = qsf_half_scale_from_e8m0(tile[part * QSF_TILE_ROWS + r]);
    return lanes_load(scales);
}

/* Unpacks 12 planes of 16 rows to 8 integers of scales and 8 of mins, each [8, 16]. Planes 0 .. 3
 * and 4 .. 7 hold integers 0 .. 3 and the two highest bits of 4 .. 7; planes 8 .. 11 their low
 * bits. */
QSF_FORCED_INLINE void unpack_6bit(const unsigned char *packed, unsigned char *scales,
                                   unsigned char *mins)
{
    for (size_t i = 0; i < 4 * QSF_TILE_ROWS; i++) {
        const unsigned char a = packed[i];
        const unsigned char b = packed[64 + i];
        const unsigned char low = packed[128 + i];
        scales[i] = a & 63;
        mins[i] = b & 63;
        scales[64 + i] = (unsigned char)((low & 15) | (a >> 2 & 48));
        mins[64 + i] = (unsigned char)(low >> 4 | (b >> 2 & 48));
    }
}

/* Integer i of scales of 4BIT, and of their mins: the low and high halves of bytes [16, 16] */
QSF_FORCED_INLINE void unpack_4bit_scales(const unsigned char *packed, unsigned char *scales,
                                          unsigned char *mins)
{
    for (size_t i = 0; i < QSF_HEAD_PARTS * QSF_TILE_ROWS; i++) {
        scales[i] = packed[i] & 15;
        mins[i] = packed[i] >> 4;
    }
}

/* head: of the tiles that have their scales in common */
QSF_FORCED_INLINE void load_part_scales(qsf_form form, const unsigned char *head, part_scales *out)
{
    const size_t n_parts = 4 * QSF_BLOCK / form.scale_cols;
    if (form.scales == QSF_SCALES_6BIT || form.scales == QSF_SCALES_4BIT) {
        unsigned char scales[QSF_HEAD_PARTS * QSF_TILE_ROWS];
        unsigned char mins[QSF_HEAD_PARTS * QSF_TILE_ROWS];
        const lanes d = lanes_load_f16(head);
        const lanes minus_d_min = lanes_mul(lanes_load_f16(head + 32), lanes_set(-1.0F));
        if (form.scales == QSF_SCALES_6BIT)
            unpack_6bit(head + 64, scales, mins);
        else
            unpack_4bit_scales(head + 64, scales, mins);
        for (size_t i = 0; i < n_parts; i++) {
            out->scale[i] = lanes_mul(d, lanes_load_u8(scales + i * QSF_TILE_ROWS));
            out->min[i] = lanes_mul(minus_d_min, lanes_load_u8(mins + i * QSF_TILE_ROWS));
        }
        return;
    }
    if (form.scales == QSF_SCALES_8BIT) {
        const lanes d = lanes_load_f16(head);
        for (size_t i = 0; i < n_parts; i++) {
            const lanes biased = lanes_load_u8(head + 32 + i * QSF_TILE_ROWS);
            out->scale[i] = lanes_mul(d, lanes_sub(biased, lanes_set(128.0F)));
        }
        return;
    }
    for (size_t i = 0; i < 2; i++) {
        out->scale[i] = form.scales == QSF_SCALES_E8M0 ? load_half_scales(head, i)
                                                       : lanes_load_f16(head + 32 * i);
        if (form.has_min)
            out->min[i] = lanes_load_f16(head + 64 + 32 * i);
    }
}

/* The scale of the integers of part `part`: of 256 * q + q_low for 8-bit codes */
QSF_FORCED_INLINE float part_act_scale(qsf_form form, const qsf_act_parts *parts, size_t part)
{
    const float scale = parts->scale[part * form.scale_cols / 32];
    return form.codes == QSF_CODES_8BIT ? scale * 0x1p-8F : scale;
}

/* The sum of q of part `part` of a block; of 256 * q + q_low for 8-bit codes, whose parts have 32
 * columns. fine_sum: of the block */
QSF_FORCED_INLINE int32_t part_sum(qsf_form form, const qsf_act_parts *sums, int32_t fine_sum,
                                   size_t part)
{
    if (form.codes == QSF_CODES_8BIT)
        return part == 0 ? sums->first_fine : fine_sum - sums->first_fine;
    return form.scale_cols == 16 ? sums->quarter[part]
                                 : sums->quarter[2 * part] + sums->quarter[2 * part + 1];
}
