/* experts_private.h - what the computing thread and the reading threads of experts share.
 *
 * Only the computing thread changes which expert a place holds; the threads change states, under
 * the lock.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STREAM_EXPERTS_PRIVATE_H
#define QSF_STREAM_EXPERTS_PRIVATE_H

#include "stream/experts.h"

static inline const qsf_unit *qsf_experts_unit(const qsf_experts *e, uint32_t expert)
{
    return &e->reader->units[e->reader->n_units_file + expert];
}

/* A reading thread of the qsf_experts. */
void *qsf_experts_read(void *experts);

#endif
