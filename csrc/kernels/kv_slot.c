/* kv_slot.c - copies what a KV page has of one position to another place. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "kernels/kernels.h"

/* The parts of a slot in a tile or a block of values: n pieces, `stride` bytes apart */
typedef struct pieces {
    size_t n;
    size_t n_bytes;
    size_t stride;
} pieces;

static void copy_pieces(const pieces *p, size_t from, const unsigned char *src, size_t to,
                        unsigned char *dst)
{
    for (size_t i = 0; i < p->n; i++)
        memcpy(dst + i * p->stride + to * p->n_bytes, src + i * p->stride + from * p->n_bytes,
               p->n_bytes);
}

void qsf_kv_copy_slot(qsf_dtype dtype, bool is_key, size_t n_blocks, size_t from, const void *src,
                      size_t to, void *dst)
{
    const bool is_quantised = qsf_dtype_is_quantised(dtype);
    const size_t n_slots = is_key ? QSF_TILE_ROWS : QSF_KV_PAGE_TOKENS;
    const size_t part_bytes =
        is_key ? qsf_dtype_tile_bytes(dtype) : qsf_kv_value_block_bytes(dtype);
    const size_t n_scales = !is_quantised ? 0 : dtype == QSF_DTYPE_8BIT ? 1 : 2;
    const size_t codes_off = n_scales * n_slots * sizeof(uint16_t);
    const size_t codes_bytes = (part_bytes - codes_off) / n_slots; /* of a slot */
    const size_t piece_bytes = !is_key        ? codes_bytes
                               : is_quantised ? 4
                                              : qsf_dtype_scalar_bytes(dtype);
    const pieces scales = {n_scales, sizeof(uint16_t), n_slots * sizeof(uint16_t)};
    const pieces codes = {codes_bytes / piece_bytes, piece_bytes, n_slots * piece_bytes};
    for (size_t b = 0; b < n_blocks; b++) {
        const size_t src_part = is_key ? from / n_slots * n_blocks + b : b;
        const size_t dst_part = is_key ? to / n_slots * n_blocks + b : b;
        const unsigned char *const in = (const unsigned char *)src + src_part * part_bytes;
        unsigned char *const out = (unsigned char *)dst + dst_part * part_bytes;
        copy_pieces(&scales, from % n_slots, in, to % n_slots, out);
        copy_pieces(&codes, from % n_slots, in + codes_off, to % n_slots, out + codes_off);
    }
}
