/* sequence.h - what a sequence holds between its passes: a cache for each kind of state.
 *
 * A cache holds what some layers need of the tokens before: attention its keys and values (kv/).
 * Sessions, drafts, branches, forks, prefixes and saved states know caches by these functions
 * alone; each calls the one of that name of every cache of the sequence. A cache that can go on
 * only at some positions, because its state cannot be cut, says so by `nearest`: tokens behind that
 * position are evaluated again.
 *
 * Whoever takes, shares or gives back memory of a pool that sequences share has the only turn.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_CACHE_SEQUENCE_H
#define QSF_CACHE_SEQUENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cache/kv/kvcache.h"

typedef struct qsf_sequence {
    qsf_kvcache kv;
} qsf_sequence;

/* Call once on a measuring arena and once on the real one. It holds nothing then. home: of
 * qsf_kvcache_layout(). */
void qsf_sequence_layout(qsf_sequence *q, qsf_arena *a, qsf_kv_pool *pool, uint32_t home);

/* Creates the files of cold parts in `folder`, which is borrowed, if there may be some. Errors of
 * qsf_file_create_unnamed(). */
qsf_status qsf_sequence_open_cold(qsf_sequence *q, const char *folder);
/* Gives everything back. */
void qsf_sequence_close(qsf_sequence *q);

/* Returns the last position up to `position` that a pass can go on at; 0 always is one. */
uint32_t qsf_sequence_nearest(const qsf_sequence *q, uint32_t position);

/* Makes room for positions begin .. end - 1, which will be stored behind those before `begin`, a
 * nearest position. From position 0 on, what is stored is forgotten. QSF_ERR_NOMEM; errors of the
 * files. After an error positions before `begin` are as they were. */
qsf_status qsf_sequence_reserve(qsf_sequence *q, uint32_t begin, uint32_t end);

/* Gives back memory that no position below n_tokens, a nearest position, needs. */
void qsf_sequence_trim(qsf_sequence *q, uint32_t n_tokens);

/* Holds what another sequence of the same model does up to a nearest position of that. After an
 * error trim it to 0. */
qsf_status qsf_sequence_share(qsf_sequence *q, qsf_sequence *from, uint32_t position);

/* The image is what continuing at a nearest position needs, whatever the context or the chunk. */
uint64_t qsf_sequence_image_bytes(const qsf_sequence *q, uint32_t position);

/* Copy n_bytes of the image from `offset` on, which must be inside it. Before loading, reserve from
 * position 0 on. What is loaded counts when the position is adopted. */
qsf_status qsf_sequence_save(qsf_sequence *q, uint32_t position, uint64_t offset, void *dst,
                             size_t n_bytes);
qsf_status qsf_sequence_load(qsf_sequence *q, uint32_t position, uint64_t offset, const void *src,
                             size_t n_bytes);
void qsf_sequence_adopt(qsf_sequence *q, uint32_t position);

/* Returns the bytes that n_tokens positions take. */
uint64_t qsf_sequence_used_bytes(const qsf_sequence *q, uint32_t n_tokens);

#endif
