/* unit_source.h - the raw bytes of one unit, front to back, read from the file.
 *
 * Uncompressed bytes come in pieces of any size, compressed ones block by block. What is
 * read passes through the running checksum; finish says whether it was the index's. Owns
 * nothing; where the bytes go is the caller's business.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_FORMAT_UNIT_SOURCE_H
#define QSF_FORMAT_UNIT_SOURCE_H

#include <stddef.h>
#include <stdint.h>

#include "format/reader.h"

typedef struct qsf_unit_source {
    qsf_reader *reader;    /* borrowed */
    unsigned char *stored; /* borrowed [stored_bytes]: codec workspace, then one block */
    size_t stored_bytes;
    uint32_t unit_idx;
    uint64_t file_done_bytes; /* stored bytes read so far */
    uint64_t raw_done_bytes;  /* raw bytes produced so far */
    uint32_t running_crc32;
    uint64_t read_bytes; /* of all units, for statistics */
    uint64_t read_ns;
} qsf_unit_source;

/* How large `stored` must be for units of this compression; 0 without one. */
size_t qsf_unit_source_stored_bytes(uint32_t compression);

void qsf_unit_source_init(qsf_unit_source *s, qsf_reader *r, unsigned char *stored,
                          size_t stored_bytes);
void qsf_unit_source_begin(qsf_unit_source *s, uint32_t unit_idx);

/* Produces the next raw bytes at dst: up to cap_bytes of an uncompressed unit, one whole
 * block of a compressed one, for which cap_bytes is at least QSF_COMPRESSED_BLOCK_BYTES or
 * all that is left of the unit. Not at the end of the unit. QSF_ERR_IO, _FORMAT. */
qsf_status qsf_unit_source_next(qsf_unit_source *s, unsigned char *dst, size_t cap_bytes,
                                size_t *n_bytes);

/* Raw bytes that have not been produced. */
uint64_t qsf_unit_source_left_bytes(const qsf_unit_source *s);

/* All is produced: was it what the index says? */
qsf_status qsf_unit_source_finish(const qsf_unit_source *s);

#endif
