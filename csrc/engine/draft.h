/* draft.h - a plan under way: what a choice of sizes takes, with the units that stay.
 *
 * Sizes come from the same layout functions that later lay the real blocks out, run on a
 * measuring arena. A sum that does not fit 64 bits is UINT64_MAX, which no ceiling allows.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_DRAFT_H
#define QSF_ENGINE_DRAFT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/records.h"
#include "model/config.h"
#include "model/kvcache.h"

/* What the plan must know; all sizes are looked up, nothing is allocated. */
typedef struct qsf_plan_input {
    const qsf_reader *reader;
    const qsf_config *config;
    const qsf_options *options; /* threads and sessions resolved; ctx and chunk may be 0 */
    uint64_t process_bytes;     /* resident before the model */
    uint64_t available_bytes;   /* what the system may still give to this process; 0 without a
                                 * limit: unknown */
    uint64_t limit_bytes;       /* of a control group, where it is what binds; 0: none */
    uint64_t fixed_bytes;       /* tables that any plan needs */
} qsf_plan_input;

/* Sizes of buffers for which it is tried whether keeping the units that need them takes less. */
#define QSF_DRAFT_LEVELS 16

typedef struct qsf_choice {
    uint32_t ctx_tokens;
    uint32_t chunk_tokens;
    uint32_t kv_k_bits;
    uint32_t kv_v_bits;
    size_t ring_bytes; /* where units that are streamed do not need more */
    uint32_t io_depth;
    uint32_t n_embedding_rows;
} qsf_choice;

/* Units that need the same buffers when they are streamed. */
typedef struct qsf_level {
    size_t buffer_bytes;
    uint64_t raw_bytes;
} qsf_level;

typedef struct qsf_draft {
    const qsf_plan_input *in;
    qsf_plan *plan;
    bool *is_resident; /* [n_units] */
    qsf_choice how;
    uint32_t n_levels;
    qsf_level levels[QSF_DRAFT_LEVELS]; /* those that need most, largest first */
} qsf_draft;

/* Looks at the units once, before the rest. */
void qsf_draft_find_levels(qsf_draft *d);

/* Fills in the plan for the draft's choice and resident units; engine_bytes is its total. */
void qsf_draft_add_up(qsf_draft *d);

/* Chooses the units that take the least memory, and adds up. That is none of them, unless the
 * buffers for the most demanding take more than they do themselves: those for a compressed unit
 * have room for a whole block, of a megabyte, and a small model takes less than a ring. */
void qsf_draft_choose_least(qsf_draft *d);

/* The process, what the caller keeps, and the engine. */
uint64_t qsf_draft_needed_bytes(const qsf_plan *plan);
bool qsf_draft_fits(const qsf_plan *plan);
/* What a plan that fits leaves. */
uint64_t qsf_draft_room_bytes(const qsf_plan *plan);

/* Of a cache of so many embedding rows. */
uint64_t qsf_plan_embedding_bytes(const qsf_config *c, uint32_t n_rows);

/* How a plan keeps keys and values. */
qsf_kv_form qsf_plan_kv_form(const qsf_plan *plan);

#endif
