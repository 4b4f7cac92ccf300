/* half_scales.h - the scales of MXFP4 as lanes.
 *
 * Included inside a target region, after a lanes_*.h.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_KERNELS_HALF_SCALES_H
#define QSF_KERNELS_HALF_SCALES_H

#include "base/half.h"
#include "kernels/forced_inline.h"

/* The scales of the 16 rows of sub-block `sub` of a tile, halved */
QSF_FORCED_INLINE lanes load_half_scales(const unsigned char *tile, size_t sub)
{
    float scales[QSF_TILE_ROWS];
    for (size_t r = 0; r < QSF_TILE_ROWS; r++)
        scales[r] = qsf_half_scale_from_e8m0(tile[sub * QSF_TILE_ROWS + r]);
    return lanes_load(scales);
}

#endif
