/* experts.h - the experts of routed layers: a pool of equal slots, filled by threads of its own.
 *
 * A layer requests its experts in ascending order. Experts in a slot are available at once; reads
 * of the others are queued together, into slots of less used experts, or into
 * transit slots, which keep nothing. Each load is verified once, before its first use. While a
 * layer is computed, experts that the next layer may want are read into free transit slots.
 * Neither caching nor guessing changes any result.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/cancel.h"
#include "format/records.h"
#include "io/io.h"
#include "platform/clock.h"
#include "platform/thread.h"

/* Pure arithmetic: the same uses give the same decisions, independent of clock and disk. */

/* Factor of all counts with each token. */
#define QSF_EXPERT_DECAY 0.97F

typedef struct qsf_expert_policy {
    float *counts; /* [n] in a growing unit, instead of multiplying all counts with each token */
    uint32_t n;
    float unit; /* one use in the counts */
} qsf_expert_policy;

/* counts [n] begin as the share of tokens that chose each expert, in [0, 1). */
void qsf_expert_policy_init(qsf_expert_policy *p, float *counts, uint32_t n);

/* Call it before n_tokens more tokens. */
void qsf_expert_policy_advance(qsf_expert_policy *p, uint32_t n_tokens);

/* Counts n_tokens uses of the expert. */
void qsf_expert_policy_use(qsf_expert_policy *p, uint32_t expert, uint32_t n_tokens);

/* True if `a` should be evicted before `b`: its count is smaller, or equal and it is needed
 * later. Distances are layers until the next use. */
bool qsf_expert_policy_is_worse(const qsf_expert_policy *p, uint32_t a, uint32_t a_distance,
                                uint32_t b, uint32_t b_distance);

/* True if a missing expert, whose use is already counted, should replace `victim`. */
bool qsf_expert_policy_admits(const qsf_expert_policy *p, uint32_t missing, uint32_t victim);

#define QSF_EXPERT_READERS 4 /* they also compute checksums */
#define QSF_EXPERT_STACK_BYTES (64 * 1024)

typedef struct qsf_expert_slot {
    enum { QSF_SLOT_EMPTY, QSF_SLOT_QUEUED, QSF_SLOT_READY, QSF_SLOT_FAILED } state;
    uint32_t expert;     /* among the experts of all layers, unless empty */
    bool stays;          /* false: a transit place; holds a guess unless is_wanted */
    bool is_wanted;      /* by the current request, and not released yet */
    uint32_t n_reading;  /* pieces */
    uint64_t job;        /* number of the job that filled it */
    uint64_t done_bytes; /* progress of the read; likewise the next */
    uint32_t crc32;
    void *memory;       /* NULL: released */
    unsigned char *raw; /* [slot_bytes], at a multiple of QSF_IO_ALIGN */
} qsf_expert_slot;

typedef struct qsf_experts_options {
    uint32_t n_slots;
    uint32_t n_transit; /* 2 or more */
    qsf_io *io;         /* borrowed, open */
} qsf_experts_options;

/* Counts since init. */
typedef struct qsf_expert_counts {
    uint64_t n_uses;          /* experts that layers requested */
    uint64_t n_hits;          /* of these, in memory */
    uint64_t n_guesses;       /* experts read ahead into a transit place before a request */
    uint64_t n_right_guesses; /* those that the next request wanted */
    uint64_t read_bytes;
    uint64_t wait_ns;
    uint64_t checksum_ns;
} qsf_expert_counts;

typedef struct qsf_experts {
    const qsf_reader *reader; /* borrowed */
    qsf_ledger *ledger;       /* borrowed */
    qsf_io *io;               /* borrowed */
    size_t slot_bytes;
    size_t piece_bytes;     /* of a read, a multiple of QSF_IO_ALIGN */
    uint32_t n_slots;       /* of the plan */
    uint32_t n_held;        /* slots not released */
    uint32_t n_lent;        /* slots lent as transit slots to a chunk of a prompt */
    uint32_t n_places;      /* slots and transit slots */
    qsf_expert_slot *slots; /* [n_places] */
    uint32_t *slot_of;      /* [n_experts] a place, or UINT32_MAX */
    uint32_t *jobs;         /* [n_places] places to fill: job i at i % n_places */
    float *counts;          /* [n_experts] of the policy */
    qsf_expert_policy policy;
    /* the present request */
    const uint32_t *wanted; /* [n_wanted] units, ascending; borrowed */
    uint32_t n_wanted;
    uint32_t n_missing; /* wanted experts that were in no slot at the request */
    uint32_t n_placed;  /* wanted experts that have a place */
    uint32_t n_released;
    bool is_released[QSF_MAX_LAYER_EXPERTS]; /* [n_wanted] */
    const uint32_t *guesses;                 /* [n_guesses] units, most probable first; borrowed */
    uint32_t n_guesses;
    uint32_t layer_idx; /* the requesting layer */
    const qsf_cancel *cancel;
    qsf_stopwatch *stopwatch;
    /* under lock, with the states of slots */
    qsf_mutex lock;
    qsf_condition has_job;
    qsf_condition has_data;
    uint64_t next_job;
    uint64_t next_off; /* in the expert of next_job */
    uint64_t end_job;
    uint32_t n_reading; /* pieces */
    bool is_stopping;
    qsf_status failure_status;
    char failure[256];
    qsf_expert_counts totals;
    qsf_thread threads[QSF_EXPERT_READERS];
    uint32_t n_threads;
} qsf_experts;

/* Bytes of a slot, in which each expert of the layers fits; 0: the model has none. */
size_t qsf_experts_slot_bytes(const qsf_reader *r);
/* Number of experts in layers that are not left out. */
uint32_t qsf_experts_count(const qsf_reader *r);
/* Bytes that a slot takes from the ledger. */
size_t qsf_experts_place_bytes(size_t slot_bytes);
/* Bytes of the tables for n_places places. */
size_t qsf_experts_table_bytes(const qsf_reader *r, uint32_t n_places);

/* Acquires all slots and starts the threads. Does nothing if the model has no experts. On failure
 * nothing is held. */
qsf_status qsf_experts_init(qsf_experts *e, const qsf_reader *r, qsf_ledger *ledger,
                            const qsf_experts_options *options);
void qsf_experts_destroy(qsf_experts *e); /* accepts a zeroed one */

/* Announces a pass of n_tokens. `cancel` and `stopwatch`: as in the stream. */
void qsf_experts_begin_pass(qsf_experts *e, uint32_t n_tokens, const qsf_cancel *cancel,
                            qsf_stopwatch *stopwatch);

/* Requests the units wanted [n_wanted] of a layer, ascending, each chosen by uses[i] tokens. They
 * stay borrowed until qsf_experts_end(). */
void qsf_experts_request(qsf_experts *e, uint32_t layer_idx, const uint32_t *wanted,
                         const uint32_t *uses, uint32_t n_wanted);

/* True if wanted[i], not released yet, is in memory. */
bool qsf_experts_is_ready(qsf_experts *e, uint32_t i);

/* Returns the wanted, unreleased expert whose read was queued first. */
uint32_t qsf_experts_next(const qsf_experts *e);

/* *out = raw bytes of wanted[i], verified, valid until it is released or the request ends. May
 * wait for the read: then all experts acquired earlier must be released, and i must be the next
 * one, or the first. */
qsf_status qsf_experts_take(qsf_experts *e, uint32_t i, const unsigned char **out);

/* Releases wanted[i], which was acquired. */
void qsf_experts_release(qsf_experts *e, uint32_t i);

/* Sets the experts that the next layer may want: units [n], most probable first, borrowed until
 * the request ends. They are read after all experts of the current request, into free transit
 * slots. */
void qsf_experts_guess(qsf_experts *e, const uint32_t *units, uint32_t n);

/* Ends the request. If it is incomplete, all reading ends, else reads of guesses continue. */
void qsf_experts_end(qsf_experts *e);

/* Ends the request, if any, and drops all guesses; all reading ends. */
void qsf_experts_end_pass(qsf_experts *e);

/* Adds the statistics of reading to `*out`. */
void qsf_experts_report(qsf_experts *e, qsf_stats *out);

/* For memory pressure, between requests. give_slot releases the slot of the least used expert;
 * false if there is none. take_slot acquires one again; false if none is missing or memory is
 * short. */
bool qsf_experts_give_slot(qsf_experts *e);
bool qsf_experts_take_slot(qsf_experts *e);

/* ---- shared by experts.c and experts_readers.c ---- */

/* Only the computing thread changes which expert a place holds; the threads change states,
 * under the lock. */
static inline const qsf_unit *qsf_experts_unit(const qsf_experts *e, uint32_t expert)
{
    return &e->reader->units[qsf_reader_expert_unit(e->reader, expert)];
}

static inline uint32_t qsf_experts_of_layer(const qsf_reader *r, uint32_t layer_idx)
{
    return qsf_reader_layer_kind(r, layer_idx)->n_experts;
}

#define QSF_EXPERTS_NONE UINT32_MAX /* no expert */

/* A reading thread of the qsf_experts. */
void *qsf_experts_read(void *experts);
