/* kvcold.h - the cold pages of a session: in a file without a name, each with a checksum.
 *
 * A layer's records (kvpool.h) lie one after the other, so that attention reads many of them at
 * once. Checksums stay in memory: 4 bytes a page.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cache/kv/kvpool.h"
#include "platform/file.h"

typedef struct qsf_kv_cold {
    qsf_file file;
    const char *folder; /* folder of the file; for error texts */
    uint32_t n_records; /* for each layer of the first group, from position 0 on; 0: no page is ever
                           cold */
    uint32_t *checksums; /* [n_cold_pages of the pool] */
    uint64_t read_bytes; /* so far */
    uint64_t written_bytes;
} qsf_kv_cold;

/* Call once on a measuring arena and once on the real one. There is no file then. */
void qsf_kv_cold_layout(qsf_kv_cold *cold, qsf_arena *a, const qsf_kv_pool *pool);

/* Creates the file. `folder` is borrowed. Errors of qsf_file_create_unnamed(). */
qsf_status qsf_kv_cold_open(qsf_kv_cold *cold, const char *folder);

/* A page of a layer of the first group */
typedef struct qsf_kv_cold_page {
    const qsf_kv_layer *layer;
    uint32_t record;
    uint32_t kv_head;
    bool is_key;
} qsf_kv_cold_page;

/* Writes bytes from .. to - 1 of a page. Parts of a page are written in ascending order.
 * QSF_ERR_IO: the disk is full, or fails. */
qsf_status qsf_kv_cold_write(qsf_kv_cold *cold, const qsf_kv_cold_page *page, size_t from,
                             size_t to, const void *src);

/* Reads bytes from .. to - 1 of a page. QSF_ERR_IO: it cannot be read; QSF_ERR_DAMAGED: the page
 * does not have its checksum. */
qsf_status qsf_kv_cold_read(qsf_kv_cold *cold, const qsf_kv_cold_page *page, size_t from, size_t to,
                            void *dst);

/* Reads records first .. end - 1 of a layer to dst. Errors as above. */
qsf_status qsf_kv_cold_read_records(qsf_kv_cold *cold, const qsf_kv_layer *layer, uint32_t first,
                                    uint32_t end, unsigned char *dst);
