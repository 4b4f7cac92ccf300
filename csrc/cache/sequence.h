/* sequence.h - the state of a sequence between passes: a cache for each kind of state.
 *
 * A cache holds what some layers need of earlier tokens: keys and values for attention (kv/),
 * states for recurrent mixers (state/). Sessions, drafts, forks, prefixes and saved states use
 * only these functions, each of which calls every cache of the sequence. A cache whose state
 * cannot be cut can continue only at some positions; `nearest` returns them, and tokens after such
 * a position are evaluated again.
 *
 * Only one thread at a time may take, share or release memory of the pools.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cache/kv/kvcache.h"
#include "cache/state/statecache.h"

/* The memory that sequences share. */
typedef struct qsf_sequence_pools {
    qsf_kv_pool kv;
    qsf_state_pool states;
    uint32_t most_hidden; /* of each sequence; 0: nothing guesses from hidden states */
    size_t hidden_stride; /* floats of a row */
} qsf_sequence_pools;

typedef struct qsf_sequence {
    qsf_kvcache kv;
    qsf_statecache states;
    /* For what guesses from hidden states, which may be wrong: not saved, nothing depends on it. */
    float *hidden; /* [most_hidden, hidden_stride] final hidden states, position p at p modulo */
    uint32_t most_hidden;
    uint32_t hidden_end; /* the last n_hidden positions before this one have rows */
    uint32_t n_hidden;
    uint32_t mtp_begin; /* the head has keys and values from this position on */
} qsf_sequence;

typedef struct qsf_sequence_form {
    qsf_kv_sizes sizes;
    qsf_kv_form kv;
    uint32_t n_drafts; /* most of a pass */
    bool keeps_hidden; /* for a drafter that reads hidden states */
    qsf_state_describe_fn *describe;
} qsf_sequence_form;

/* Call once on a measuring arena and once on the real one. Snapshots of states take at most as
 * much memory as keys and values, but at least room for two. */
void qsf_sequence_pools_layout(qsf_sequence_pools *pools, qsf_arena *a, const qsf_config *c,
                               const qsf_sequence_form *form);

/* Call once on a measuring arena and once on the real one. The sequence is empty then. home: of
 * qsf_kvcache_layout(). */
void qsf_sequence_layout(qsf_sequence *q, qsf_arena *a, qsf_sequence_pools *pools, uint32_t home);

/* Creates the files for cold pages in `folder`, which is borrowed, if pages can become cold.
 * Errors of qsf_file_create_unnamed(). */
qsf_status qsf_sequence_open_cold(qsf_sequence *q, const char *folder);
/* Releases all memory. */
void qsf_sequence_close(qsf_sequence *q);

/* Returns the last position <= `position` from which a pass can continue; 0 is always possible. */
uint32_t qsf_sequence_nearest(const qsf_sequence *q, uint32_t position);

/* True if a pass can continue at `position`, perhaps after evaluating positions again. False:
 * positions that it needs are lost. */
bool qsf_sequence_can_return(const qsf_sequence *q, uint32_t position);

/* Begins a pass: makes room for positions begin .. end - 1, of which the last n_drafts are drafts.
 * `begin` is a nearest position; 0 forgets all stored positions. QSF_ERR_NOMEM; errors of the
 * files. After an error positions before `begin` are unchanged. */
qsf_status qsf_sequence_begin(qsf_sequence *q, uint32_t begin, uint32_t end, uint32_t n_drafts);
/* Ends a pass: keeps or drops what it stored. */
void qsf_sequence_commit(qsf_sequence *q);
void qsf_sequence_abandon(qsf_sequence *q);

/* Keeps the final hidden states, rows [n_rows, hidden_stride], of the last n_rows positions before
 * `end`, as far as there is room. */
void qsf_sequence_keep_hidden(qsf_sequence *q, uint32_t end, const float *rows, uint32_t n_rows,
                              size_t stride);

/* Returns the final hidden state [stride] of the token at `position`; NULL: it is not known. */
const float *qsf_sequence_hidden(const qsf_sequence *q, uint32_t position, size_t stride);

/* Releases memory that no position up to n_tokens needs. */
void qsf_sequence_trim(qsf_sequence *q, uint32_t n_tokens);

/* Shares the contents of another sequence of the same model up to a nearest position of it.
 * After an error trim this sequence to 0. */
qsf_status qsf_sequence_share(qsf_sequence *q, qsf_sequence *from, uint32_t position);

/* The image contains all that continuing at a nearest position needs. It does not depend on the
 * context or the chunk. */
uint64_t qsf_sequence_image_bytes(const qsf_sequence *q, uint32_t position);

/* Copy n_bytes of the image from `offset` on, which must be inside it. Loaded bytes, after
 * begin_load, become valid when the position is adopted. */
qsf_status qsf_sequence_begin_load(qsf_sequence *q, uint32_t position);
qsf_status qsf_sequence_save(qsf_sequence *q, uint32_t position, uint64_t offset, void *dst,
                             size_t n_bytes);
qsf_status qsf_sequence_load(qsf_sequence *q, uint32_t position, uint64_t offset, const void *src,
                             size_t n_bytes);
void qsf_sequence_adopt(qsf_sequence *q, uint32_t position);

/* Returns the bytes that n_tokens positions take. */
uint64_t qsf_sequence_used_bytes(const qsf_sequence *q, uint32_t n_tokens);
