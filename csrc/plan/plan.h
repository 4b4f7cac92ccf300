/* plan.h - decides, before anything is allocated, where the memory of a model goes.
 *
 * The layout functions that later lay out the real allocations compute the sizes, so the plan and
 * the allocations agree. If memory is short, the plan reduces, in this order: resident units
 * (residence.h); then the prompt chunk, the context and the ring in turns. It never changes a
 * number that the caller has set. If that is not enough, the error names a budget that would work.
 * docs/memory.md has the reasons.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/config.h"
#include "format/records.h"
#include "include/qsf.h"

/* The inputs of the plan. Planning only looks sizes up and allocates nothing. */
typedef struct qsf_plan_input {
    const qsf_reader *reader;
    const qsf_config *config;
    const qsf_options *options; /* n_threads and max_sessions are not 0; ctx and chunk may be */
    uint64_t process_bytes;     /* resident before the model */
    uint64_t available_bytes;   /* memory that the system has left for this process; 0 without a
                                   limit: unknown */
    uint64_t limit_bytes;       /* limit of the control group if it is the tighter one; 0: none */
    uint64_t fixed_bytes;       /* tables that every plan needs */
    uint64_t drafter_bytes;     /* of a draft model that is held; 0: none */
    bool has_pool;              /* the threads belong to another model */
    bool has_table_on_disk;     /* rows of a separate embedding table are read from the file, even
                                   if there is room for the table */
    /* Fills the sizes of sessions, of the scratch and of shared buffers, using their layout
     * functions; UINT64_MAX for a size that does not fit 64 bits. */
    void (*measure_sessions)(const qsf_config *c, qsf_plan *plan);
} qsf_plan_input;

/* Fills *plan and is_resident [n_stream_units of the reader]. QSF_ERR_NOMEM: *plan is the smallest
 * possible plan. QSF_ERR_ARG: the context is longer than the model allows. */
qsf_status qsf_plan_make(const qsf_plan_input *in, qsf_plan *plan, bool *is_resident);

/* ---- a candidate: a plan while its numbers are chosen, shared by plan.c and candidate.c ---- */

/* The layout functions that later lay out the real allocations compute the sizes, on a measuring
 * arena. A sum that does not fit 64 bits becomes UINT64_MAX, which is above every ceiling. */

/* Tiers for which the plan compares streaming with keeping. */
#define QSF_CANDIDATE_TIERS 16

typedef struct qsf_choice {
    uint32_t ctx_tokens;
    uint32_t resident_tokens; /* tokens of the context in memory; larger values mean all */
    uint32_t chunk_tokens;
    uint32_t kv_k_bits;
    uint32_t kv_v_bits;
    size_t ring_bytes; /* larger if streamed units need it */
    uint32_t io_depth;
    uint32_t n_embedding_rows;
    uint32_t n_expert_slots;
    uint32_t draft_rows;
} qsf_choice;

/* Units that need equally large buffers when they are streamed. */
typedef struct qsf_tier {
    size_t buffer_bytes;
    uint64_t raw_bytes;
} qsf_tier;

typedef struct qsf_candidate {
    const qsf_plan_input *in;
    qsf_plan *plan;
    bool *is_resident; /* [n_stream_units] */
    qsf_choice how;
    uint32_t n_tiers;
    qsf_tier tiers[QSF_CANDIDATE_TIERS]; /* the most demanding ones, largest first */
} qsf_candidate;

/* Finds the tiers. Call it before the other functions. */
void qsf_candidate_find_tiers(qsf_candidate *d);

/* Fills the plan's fields on experts. Call it once, before the other functions. */
void qsf_candidate_find_experts(qsf_candidate *d);

/* Returns how many slots of experts n_bytes hold, at most one for each expert. */
uint32_t qsf_candidate_count_slots(const qsf_candidate *d, uint64_t n_bytes);

/* Computes the plan for the candidate's choices; engine_bytes is the total. */
void qsf_candidate_add_up(qsf_candidate *d);

/* Keeps the embedding table if that takes no more memory than reading its rows from the disk, and
 * computes the plan. */
void qsf_candidate_weigh_table(qsf_candidate *d);

/* Chooses the resident units that need the least memory, and computes the plan. Usually no unit is
 * resident. But the buffers for the most demanding units may be larger than these units: buffers
 * for a compressed unit hold a whole chunk of 1 MiB, and a small model is smaller than a ring. */
void qsf_candidate_choose_least(qsf_candidate *d);

/* Returns the sum of the process, the caller's reserve and the engine. */
uint64_t qsf_candidate_needed_bytes(const qsf_plan *plan);
bool qsf_candidate_fits(const qsf_plan *plan);
/* Returns the free bytes of a plan that fits. */
uint64_t qsf_candidate_room_bytes(const qsf_plan *plan);

/* Returns the bytes of a cache of n_rows embedding rows. */
uint64_t qsf_plan_embedding_bytes(const qsf_config *c, uint32_t n_rows);

/* ---- the ceiling ---- */

/* If the budget is larger than the memory that the machine or the control group has left, the
 * system kills a process. So the available memory, less a margin, is a bound too:
 *
 *     in a group   the larger of 2 MiB and a hundredth of the limit, for what the kernel charges to
 *                  the group in addition: page tables (a five-hundredth) and records of threads;
 *                  plus the page cache that running reads lock, which cannot be reclaimed
 *     outside      a sixteenth of the available memory, at most 256 MiB, so that other processes
 *                  keep running and the system does not swap */

typedef struct qsf_supply {
    uint64_t process_bytes;   /* resident before the model is opened */
    uint64_t available_bytes; /* memory that is still free; 0 without a limit: unknown */
    uint64_t limit_bytes;     /* limit of the control group if it is the tighter one; 0: none */
    uint64_t locked_bytes;    /* page cache that running reads lock; charged to the group */
} qsf_supply;

/* Returns how many of available_bytes stay free. */
uint64_t qsf_ceiling_margin_bytes(const qsf_supply *s);

/* Returns the lower of the budget (0: none) and the memory there is; 0 only if neither is known. */
uint64_t qsf_ceiling_bytes(const qsf_supply *s, uint64_t budget_bytes);

/* Returns the budget for QSF_BUDGET_AUTO: half of the memory that would be free without this
 * process, at least 200 MiB; 200 MiB if it is unknown. */
uint64_t qsf_ceiling_auto_budget_bytes(const qsf_supply *s);
