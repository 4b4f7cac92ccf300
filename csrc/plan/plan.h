/* plan.h - decides, before anything is allocated, where the memory of a model goes.
 *
 * The layout functions that later lay out the real allocations compute the sizes, so the plan and
 * the allocations agree. If memory is short, the plan reduces, in this order: resident units
 * (see below); then the prompt chunk, the context and the ring in turns. It never changes a
 * number that the caller has set. If that is not enough, the error names a budget that would work.
 * docs/memory.md has the reasons.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/config.h"
#include "format/records.h"
#include "include/qsf.h"
#include "stream/stream.h"

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
    uint64_t adapters_bytes;
    bool has_pool;          /* the threads belong to another model */
    bool has_table_on_disk; /* rows of a separate embedding table are read from the file, even
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

/* ---- which units are resident if there is no room for all ---- */

/* Each pass reads every streamed unit once, so a resident byte saves a byte of reading, whichever
 * unit it belongs to. The choice of layers decides how well reading and computing overlap:
 *
 *     side by side    R R R R R R S S     the disk fills the ring, then waits for six layers
 *     spread          S R R R S R R R     it fills the ring twice, and waits for three layers
 *
 * A layer of 112 MB (7B, 4 bits) is computed in 4 to 7 ms from memory (16 to 30 GB/s) and read in
 * 62 ms (1.8 GB/s). A ring of 16 MiB takes 9 ms to fill: the time of one or two resident layers.
 * In longer runs of resident layers the disk idles, so all runs are about equally long, also the
 * one around the end of the pass, with the head and the choice of the token. */

/* Marks more units as resident, at most room_bytes raw: the head first, then layers, then any
 * unit that still fits. Ignores separate embedding tables. Returns the bytes of the marked
 * units. Its time is proportional to the number of units. */
uint64_t qsf_residence_add(const qsf_reader *r, uint64_t room_bytes, bool *is_resident);

/* Returns the raw bytes of the longest run of resident units between two streamed ones, also around
 * the end of the pass; 0 if nothing is streamed. */
uint64_t qsf_residence_longest_run_bytes(const qsf_reader *r, const bool *is_resident);

/* ---- which unit is evicted next under memory pressure, and which returns first ---- */

/* A separate embedding table is evicted first, because streaming it costs one small read for each
 * token; loading it again needs a ring, so there must be one already. Layers follow, each as far
 * from streamed layers as possible, so that reads overlap with computing. The head, as large as
 * several layers, is last. */

#define QSF_UNIT_NONE UINT32_MAX /* no unit of the file */

/* The units that are resident now, and those that were at open. */
typedef struct qsf_residency {
    const qsf_stream *stream;
    const bool *is_planned; /* [n_stream_units] */
} qsf_residency;

/* Returns a resident unit that takes more memory than streaming it would; QSF_UNIT_NONE: none. */
uint32_t qsf_eviction_choose(const qsf_residency *now);

/* Returns the unit to load next: the reverse order, but a separate embedding table returns while
 * another unit still keeps the ring. QSF_UNIT_NONE: no planned unit is missing, or there is no ring
 * to load it through. */
uint32_t qsf_eviction_choose_return(const qsf_residency *now);

/* ---- when memory must be released to the system, and when it may be taken again ---- */

/* The decision depends only on measurements of the system, not on the model. model_memory.c
 * calls it between units, at most every quarter of a second, and acts. */

/* Measurements of the system at one moment. */
typedef struct qsf_pressure_signs {
    uint64_t now_ns;
    uint64_t available_bytes; /* MemAvailable, or what the control group leaves if lower */
    uint64_t total_bytes;     /* of the machine or the group */
    double stalled_percent; /* share of the last 10 s in which all tasks waited for memory (PSI) */
} qsf_pressure_signs;

#define QSF_PRESSURE_EVENTS 16

typedef void qsf_pressure_look_fn(void *arg, qsf_pressure_signs *out);

typedef struct qsf_pressure {
    qsf_pressure_look_fn *look; /* reads the measurements; tests replace it */
    void *look_arg;
    uint64_t pause_ns; /* between two measurements */
    uint64_t open_ns;
    uint64_t next_look_ns;
    uint64_t low_bytes;       /* less available memory means pressure; 0: unknown */
    uint64_t next_cost_bytes; /* bytes that acquiring the next unit again needs; 0: no unit was
                                 released */
    uint64_t calm_since_ns;   /* 0: not calm */
    uint64_t calm_ns;         /* how long calm must last before memory is taken */
    uint64_t last_give_ns;
    uint64_t last_take_ns;                        /* 0: none since the last release */
    uint64_t n_events;                            /* since open; only the latest events are kept */
    qsf_memory_event events[QSF_PRESSURE_EVENTS]; /* event i at i % QSF_PRESSURE_EVENTS */
    uint64_t n_given_back;
    uint64_t n_taken_again;
    uint64_t given_back_bytes;
    uint64_t taken_again_bytes;
} qsf_pressure;

/* Sets low_bytes from the memory that is available right after open, less the planned memory that
 * is not touched yet. */
void qsf_pressure_init(qsf_pressure *p, const qsf_pressure_signs *signs);

/* Decides without touching the model: *give > 0 bytes to release, or *take > 0 bytes that may be
 * taken (at least next_cost_bytes), or neither. */
void qsf_pressure_judge(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t *give,
                        uint64_t *take);

/* True if the next measurement is due at now_ns. */
bool qsf_pressure_is_due(const qsf_pressure *p, uint64_t now_ns);

/* Records that n_bytes were released (is_given) or taken; n_units_resident is the number
 * afterwards. */
void qsf_pressure_record(qsf_pressure *p, const qsf_pressure_signs *signs, uint64_t n_bytes,
                         bool is_given, uint32_t n_units_resident);

/* Copies the latest events, oldest first; returns their number. */
size_t qsf_pressure_list_events(const qsf_pressure *p, qsf_memory_event *out, size_t cap_events);
