/* adapter.h - files of adapters of low rank, W + factor * B A (docs/format.md, section 11).
 *
 * An adapter belongs to one file of weights. It is opened and checked in two steps, because its
 * memory is planned between them.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/config.h"
#include "format/records.h"

#define QSF_ADAPTER_HEADER_BYTES 128
#define QSF_ADAPTER_ENTRY_BYTES 32
#define QSF_MAX_RANK 1024U

/* What one adapter adds to the product of a matrix. */
typedef struct qsf_low_rank {
    const unsigned char *a; /* tiles of [rank, n_cols], in `dtype` */
    const unsigned char *b; /* of the tile rows of the matrix, as add_low_rank takes them */
    uint32_t dtype;         /* f16; else both have 8 bits */
    uint32_t rank;
    float factor;
    uint32_t adapter_idx;      /* whose scale it is multiplied by, too */
    struct qsf_low_rank *next; /* of another adapter of the same matrix, or NULL */
} qsf_low_rank;

/* Bytes of B for a tile row */
static inline size_t qsf_low_rank_b_bytes(const qsf_low_rank *m)
{
    const size_t n = (size_t)m->rank * QSF_TILE_ROWS;
    return m->dtype == QSF_DTYPE_F16 ? 2 * n : 2 * QSF_TILE_ROWS + n;
}

typedef struct qsf_adapter {
    qsf_file file;
    uint32_t dtype;
    uint32_t n_matrices;
    uint32_t most_rank;
    float scale;            /* of new sessions; set after it was opened */
    uint32_t crc32[2];      /* of the header, which has that of the rest */
    unsigned char *bytes;   /* the file, then the matrices */
    qsf_low_rank *matrices; /* [n_matrices] */
} qsf_adapter;

/* Opens `path` and checks its header. QSF_ERR_ARG: it was made for another file than r's, which
 * lies at base_path. After an error nothing is open. */
qsf_status qsf_adapter_open(qsf_adapter *a, const char *path, qsf_reader *r, const char *base_path);

/* Bytes that qsf_adapter_load needs. */
size_t qsf_adapter_bytes(const qsf_adapter *a);

/* Reads the file into `memory` (qsf_adapter_bytes, aligned to 64 bytes, borrowed by the layers),
 * checks it, and adds its matrices to layers [n_layers of c], as those of adapter `idx`. Closes the
 * file, unless it fails. */
qsf_status qsf_adapter_load(qsf_adapter *a, uint32_t idx, void *memory, const qsf_reader *r,
                            const qsf_config *c, qsf_layer *layers);

/* QSF_ERR_ARG: the scale times the factor of a matrix is not finite. */
qsf_status qsf_adapter_check_scale(const qsf_adapter *a, float scale);

/* Closes the file; a second call does nothing. */
void qsf_adapter_close(qsf_adapter *a);
