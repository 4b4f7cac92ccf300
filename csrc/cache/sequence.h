/* sequence.h - the state of a sequence between passes: a cache for each kind of state.
 *
 * A cache holds what some layers need of the tokens before: attention its keys and values (kv/),
 * recurrent mixers their states (state/). Sessions, drafts, forks, prefixes and saved
 * states know caches by these functions alone; each calls every cache of the sequence. A cache that
 * can go on only at some positions, because its state cannot be cut, says so by `nearest`: tokens
 * after that position are evaluated again.
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
#include "cache/state/statecache.h"

/* The memory that sequences share. */
typedef struct qsf_sequence_pools {
    qsf_kv_pool kv;
    qsf_state_pool states;
} qsf_sequence_pools;

typedef struct qsf_sequence {
    qsf_kvcache kv;
    qsf_statecache states;
} qsf_sequence;

typedef struct qsf_sequence_form {
    qsf_kv_sizes sizes;
    qsf_kv_form kv;
    uint32_t n_drafts; /* most of a pass */
    qsf_state_describe_fn *describe;
} qsf_sequence_form;

/* Call once on a measuring arena and once on the real one. Snapshots of states take at most as much
 * memory as keys and values, but two always have room. */
void qsf_sequence_pools_layout(qsf_sequence_pools *pools, qsf_arena *a, const qsf_config *c,
                               const qsf_sequence_form *form);

/* Call once on a measuring arena and once on the real one. It holds nothing then. home: of
 * qsf_kvcache_layout(). */
void qsf_sequence_layout(qsf_sequence *q, qsf_arena *a, qsf_sequence_pools *pools, uint32_t home);

/* Creates the files of cold parts in `folder`, which is borrowed, if there may be some. Errors of
 * qsf_file_create_unnamed(). */
qsf_status qsf_sequence_open_cold(qsf_sequence *q, const char *folder);
/* Gives everything back. */
void qsf_sequence_close(qsf_sequence *q);

/* Returns the last position <= `position` from which a pass can continue; 0 is always possible. */
uint32_t qsf_sequence_nearest(const qsf_sequence *q, uint32_t position);

/* True if a pass can go on at `position`, or after positions that are evaluated again. False: what
 * it sees is gone for good. */
bool qsf_sequence_can_return(const qsf_sequence *q, uint32_t position);

/* Begins a pass: makes room for positions begin .. end - 1, the last n_drafts of which are drafts,
 * after those before `begin`, a nearest position. From position 0 on, what is stored is forgotten.
 * QSF_ERR_NOMEM; errors of the files. After an error positions before `begin` are as they were. */
qsf_status qsf_sequence_begin(qsf_sequence *q, uint32_t begin, uint32_t end, uint32_t n_drafts);
/* Ends a pass: what it stored counts, or does not. */
void qsf_sequence_commit(qsf_sequence *q);
void qsf_sequence_abandon(qsf_sequence *q);

/* Gives back memory that no position up to n_tokens needs. */
void qsf_sequence_trim(qsf_sequence *q, uint32_t n_tokens);

/* Holds what another sequence of the same model does up to a nearest position of that. After an
 * error trim it to 0. */
qsf_status qsf_sequence_share(qsf_sequence *q, qsf_sequence *from, uint32_t position);

/* The image is what continuing at a nearest position needs, whatever the context or the chunk. */
uint64_t qsf_sequence_image_bytes(const qsf_sequence *q, uint32_t position);

/* Copy n_bytes of the image from `offset` on, which must be inside it. What is loaded, behind
 * begin_load, counts when the position is adopted. */
qsf_status qsf_sequence_begin_load(qsf_sequence *q, uint32_t position);
qsf_status qsf_sequence_save(qsf_sequence *q, uint32_t position, uint64_t offset, void *dst,
                             size_t n_bytes);
qsf_status qsf_sequence_load(qsf_sequence *q, uint32_t position, uint64_t offset, const void *src,
                             size_t n_bytes);
void qsf_sequence_adopt(qsf_sequence *q, uint32_t position);

/* Returns the bytes that n_tokens positions take. */
uint64_t qsf_sequence_used_bytes(const qsf_sequence *q, uint32_t n_tokens);

#endif
