/* qsf_stats.h - part of qsf.h: measurements and tracing. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_STATS_H
#define QSF_STATS_H

#include "qsf_library.h"

QSF_C_BEGIN

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

#define QSF_N_PHASES 11 /* number of values of qsf_phase */

/* Sources of drafts: 0 n-gram match in the context, 1 n-gram table of earlier top predictions,
 * 2 draft model, 3 the caller. */
#define QSF_N_GUESSERS 4

/* Parts of a call of sync, score or step. Each nanosecond of the calling thread belongs to exactly
 * one of them. */
typedef enum qsf_phase {
    QSF_PHASE_EMBEDDING = 0, /* embedding rows, positions, RoPE tables */
    QSF_PHASE_NORM = 1,      /* norms, and rounding their results to integers */
    QSF_PHASE_QKV = 2, /* Q, K, V, bias, RoPE and the KV store. Times of products include sparse
                          outliers and waiting for the slowest thread */
    QSF_PHASE_ATTENTION = 3,
    QSF_PHASE_ATTN_OUT = 4,   /* rounding, the output matrix, the residual */
    QSF_PHASE_GATE_UP = 5,    /* gate and up, or only up, with the activation */
    QSF_PHASE_DOWN = 6,       /* rounding, down, the residual, the end of the layer */
    QSF_PHASE_HEAD = 7,       /* logits */
    QSF_PHASE_WAIT = 8,       /* waiting for the disk, taken out of the parts above */
    QSF_PHASE_DECOMPRESS = 9, /* decompressing, taken out of the parts above */
    QSF_PHASE_OTHER = 10      /* checking arguments, waiting for other sessions, watching memory,
                               * beginning streamed units */
} qsf_phase;

/* Returns the short name of a phase, such as "qkv", or "unknown": a static string, never NULL. */
QSF_API const char *qsf_phase_name(uint32_t phase);

typedef struct qsf_stats {
    uint64_t prompt_tokens; /* tokens evaluated by sync and score */
    uint64_t prompt_ns;
    uint64_t step_tokens; /* tokens evaluated by step */
    uint64_t step_ns;
    uint64_t read_bytes;      /* weights read from the file since open */
    uint64_t read_ns;         /* time with at least one read of streamed weights in flight */
    uint64_t wait_ns;         /* time that computing waited for streamed weights */
    uint64_t checksum_ns;     /* time for checksums, in the reading threads */
    uint64_t decompress_ns;   /* time for decompressing */
    uint64_t n_allocations;   /* calls of the allocator since open */
    uint64_t allocated_bytes; /* bytes that the engine holds now */
    uint64_t
        kv_used_bytes; /* KV pages of this session's tokens, and its states; shared ones included */
    uint64_t kv_read_bytes; /* bytes of this session's keys and values read from its file since its
                               creation */
    uint64_t kv_written_bytes;
    uint64_t n_again; /* tokens of this session that were evaluated again, because it was rewound
                         and recurrent states cannot be cut */
    uint64_t kv_free_tokens; /* positions of the model's KV pool that no session has */
    /* of the model since open: loops over rows or tokens, those that ran on several threads, and
     * the time of the latter, including waiting for the slowest thread */
    uint64_t n_loops;
    uint64_t n_parallel_regions;
    uint64_t parallel_ns;
    /* rows of an embedding that is not resident: requested, and cached */
    uint64_t n_embedding_rows;
    uint64_t n_embedding_hits;
    /* experts that layers used; those found in memory; those read ahead for the next layer; how
     * many of these it used; bytes read for experts, which read_bytes includes */
    uint64_t n_expert_uses;
    uint64_t n_expert_hits;
    uint64_t n_expert_guesses;
    uint64_t n_expert_right_guesses;
    uint64_t expert_read_bytes;
    /* under memory pressure: how often and how many bytes were released, and taken again */
    uint64_t n_given_back;
    uint64_t n_taken_again;
    uint64_t given_back_bytes;
    uint64_t taken_again_bytes;
    /* prompt_ns and step_ns of this session, split by qsf_phase. Calls that failed count in
     * neither */
    uint64_t phase_ns[QSF_N_PHASES];
    uint64_t sample_ns;                 /* time in qsf_session_sample */
    uint64_t n_samples;                 /* tokens that qsf_session_sample chose */
    uint64_t n_step_passes;             /* passes over the weights for step_tokens */
    uint64_t n_step_rows;               /* tokens evaluated in them, rejected drafts included */
    uint64_t n_drafted[QSF_N_GUESSERS]; /* drafts evaluated, and drafts that were right */
    uint64_t n_accepted[QSF_N_GUESSERS];
} qsf_stats;

/* Fills *out. If s is NULL, *out does not change. */
QSF_API void qsf_session_stats(const qsf_session *s, qsf_stats *out);

/* Times of one unit, summed over all passes since open. Reading runs ahead of computing, so the
 * times of neighbouring units overlap. */
typedef struct qsf_unit_time {
    uint64_t n_passes;   /* passes that used the unit */
    uint64_t read_bytes; /* bytes read from the file in these passes */
    uint64_t read_ns;    /* time from the start of the first read to the end of the last */
    uint64_t wait_ns;    /* time that computing waited for the unit */
    uint64_t
        compute_ns; /* time from the unit's beginning to its end, without reading and waiting */
    uint32_t is_resident;
    uint32_t is_skipped; /* 1: the layer is skipped, and the fields above are 0 */
    uint32_t role;       /* 0 embedding, 1 layer, 2 final norm and head */
    uint32_t layer;      /* of a layer, from 0; else 0 */
} qsf_unit_time;

/* Fills out [cap_units], one entry for each unit of the file: embedding, layers (skipped ones
 * too), final norm and head. Returns the number of units. */
QSF_API size_t qsf_model_timeline(qsf_model *m, qsf_unit_time *out, size_t cap_units);

/* Memory that was released under pressure, or taken again. */
typedef struct qsf_memory_event {
    uint64_t seconds;          /* since open */
    uint64_t bytes;            /* bytes released or taken again */
    uint64_t available_bytes;  /* available memory of the system before the event */
    uint32_t is_given_back;    /* 0: taken again */
    uint32_t n_units_resident; /* resident units after the event */
} qsf_memory_event;

/* Fills out [cap_events] with the latest events, oldest first. Returns the number of events. */
QSF_API size_t qsf_model_memory_events(qsf_model *m, qsf_memory_event *out, size_t cap_events);

/* ---- cdef end ---- */

QSF_C_END

#endif
