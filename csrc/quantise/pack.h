/* pack.h - makes a tile from codes, scales and mins (docs/format.md, section 5). */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "quantise/rounder.h"

/* Writes the tile of a quantised type. Codes, scales and mins after n_rows, and codes after
 * n_cols, become 0. `codes` are integers. */
void qsf_pack_tile(uint32_t dtype, const qsf_tile_floats *codes, const qsf_fit *fit, size_t n_rows,
                   size_t n_cols, unsigned char *tile);
