/* model.h - a model: its file, its plan, its memory; and its sessions: one token sequence and its
 * KV cache each, the passes that evaluate its tokens, and the drafts that these evaluate ahead.
 *
 * plan.c plans the memory, model_open.c and session.c acquire it, and model.c releases it.
 * Evaluating tokens changes a session only on success.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

#include "cache/sequence.h"
#include "format/adapter.h"
#include "format/records.h"
#include "include/qsf.h"
#include "kernels/kernels.h"
#include "machine/machine.h"
#include "memory/arena.h"
#include "memory/ledger.h"
#include "model/forward.h"
#include "model/ops.h"
#include "plan/plan.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "speculate/ngrams.h"
#include "speculate/speculation_budget.h"
#include "stream/stream.h"
#include "text/text.h"

/* ---- from logits to a token: mask, biases, penalties, temperature, top-k, top-p, min-p ---- */

/* Deterministic: it has its own random generator and exponentials, and of equal logits prefers the
 * lower id. Allocates nothing. */

typedef struct qsf_sampler {
    uint32_t n_vocab;
    float *adjusted;  /* [n_vocab] logits after mask, biases and penalties */
    uint32_t *heap;   /* [n_vocab] ids of candidates; those taken off are at the end */
    double *weights;  /* [n_vocab] exp((score - largest) / temperature) by rank */
    float *odds;      /* [n_vocab] the same by id, rounded; shares the memory of weights */
    float *tops;      /* [buckets] largest score of each; see kernels.h */
    float *sums;      /* [strips] of the odds */
    uint8_t *is_seen; /* [n_vocab] marks, all zero between calls */
} qsf_sampler;

/* Changes of the logits for one choice. */
typedef struct qsf_adjustment {
    const uint32_t *recent; /* [n_recent] ids below n_vocab, see qsf_choose_item */
    size_t n_recent;
    size_t n_counted;
    const uint32_t *mask;   /* [ceil(n_vocab / 32)], or NULL */
    const uint32_t *biased; /* [n_biased] ids below n_vocab */
    const float *biases;
    size_t n_biased;
} qsf_adjustment;

void qsf_sampler_layout(qsf_sampler *s, qsf_arena *a, uint32_t n_vocab);

/* QSF_ERR_ARG names the parameter that is out of range. _shift: checks a number that is added to
 * logits. */
qsf_status qsf_sampling_check_shift(const char *name, float shift);
qsf_status qsf_sampling_check(const qsf_sampling *how);

/* logits [n_vocab]. The parameters have been checked. QSF_ERR_NUMERIC: a logit is not finite.
 * QSF_ERR_ARG: the mask allows no token. */
qsf_status qsf_sampler_choose(qsf_sampler *s, const qsf_kernels *k, const float *logits,
                              const qsf_sampling *how, const qsf_adjustment *change,
                              uint64_t *random_state, uint32_t *token);

/* logits [n_vocab]; tokens [n_tokens], 1 <= n_tokens <= n_vocab + 1, tokens[0] below n_vocab: see
 * qsf_session_logprobs(). QSF_ERR_NUMERIC: a logit is not finite. */
qsf_status qsf_sampler_logprobs(qsf_sampler *s, const qsf_kernels *k, const float *logits,
                                uint32_t *tokens, float *logprobs, size_t n_tokens);

/* Returns the next number of a splitmix64 sequence (Steele, Lea, Flood 2014); _uniform: in [0, 1).
 */
uint64_t qsf_random_next(uint64_t *state);
double qsf_random_uniform(uint64_t *state);

/* Returns the state after n_draws more. */
uint64_t qsf_random_after(uint64_t state, uint32_t n_draws);

/* ---- the memory of sessions, and what all sessions of a model share ---- */

/* A guess of the next token, and its kind (speculation_budget.h) */
typedef struct qsf_guess {
    uint32_t token;
    uint32_t kind;
} qsf_guess;

typedef struct qsf_session_buffers {
    qsf_sequence sequence;
    uint32_t *tokens;     /* [ctx_tokens] */
    float *logits;        /* [n_vocab] after the last token */
    uint32_t *offered;    /* [draft_rows] */
    uint8_t *draft_kinds; /* [draft_rows] of the drafts of the latest pass */
    qsf_ngram_token
        *likeliest; /* [1 + draft_rows] most probable token after each token of the latest pass */
    /* [1 + draft_rows] the draft model's guesses after the pass's token and after each draft;
     * QSF_KIND_CALLER: no guess */
    qsf_guess *model_guesses;
} qsf_session_buffers;

/* Returns the sizes and forms of the plan's pools. */
qsf_sequence_form qsf_plan_sequence_form(const qsf_config *c, const qsf_plan *plan);

/* Returns the sizes of the plan's scratch. */
qsf_scratch_sizes qsf_plan_scratch_sizes(const qsf_plan *plan);

/* measure_sessions of qsf_plan_input: the pool of KV pages, one session, the scratch of a chunk
 * and the shared buffers. */
void qsf_session_measure(const qsf_config *c, qsf_plan *plan);

/* Call once on a measuring arena and once on the real one, whose memory is zeroed. `home`: of
 * qsf_sequence_layout(). */
void qsf_session_layout(qsf_session_buffers *b, qsf_arena *a, const qsf_config *c,
                        const qsf_plan *plan, qsf_sequence_pools *pools, uint32_t home);

/* One session's part of a pass. */
typedef struct qsf_pass_part {
    qsf_session *session;
    const uint32_t *tokens; /* [n_tokens] */
    uint32_t n_tokens;
    uint32_t n_rows; /* logits of the last n_rows tokens */
    float *rows; /* [n_rows, n_vocab] receives the logits; NULL: they stay in the shared buffer */
    qsf_status status;
    bool may_draft;    /* the pass may also evaluate drafts of the next tokens: see drafting.c */
    uint32_t n_drafts; /* the last tokens are drafts, which the session does not own yet */
    uint32_t n_hidden; /* for parts without rows, as in qsf_pass_item */
    double *hidden;    /* [vector_dim] */
    float *residual;   /* [n_tokens, dim], or NULL: as in qsf_pass_item */
} qsf_pass_part;

/* Buffers of a model that one pass uses at a time, and one choice of a token. */
typedef struct qsf_shared_buffers {
    qsf_pass_part *parts;          /* [max_sessions] */
    qsf_rows_wanted *wanted;       /* [max_sessions] of these parts */
    qsf_segment *segments;         /* [max_sessions] */
    const atomic_bool **cancelled; /* [max_sessions] */
    uint32_t *tokens;              /* [chunk_tokens] */
    uint32_t *head_rows;           /* [chunk_tokens] */
    float *logits;                 /* [rows of the plan and drafts, n_vocab], of */
    uint64_t logits_pass;          /* the pass with this number */
    qsf_sampler sampler;
    qsf_costs costs;
    qsf_ngrams ngrams; /* empty if the plan has no draft_rows */
} qsf_shared_buffers;

/* As qsf_session_layout(). */
void qsf_shared_layout(qsf_shared_buffers *b, qsf_arena *a, const qsf_config *c,
                       const qsf_plan *plan);

/* ---- a session ---- */

/* How the latest token was chosen from a session's logits. */
typedef struct qsf_last_choice {
    qsf_sampling how;
    uint64_t random_state; /* after it */
    uint32_t n_tokens;     /* that the session held */
    uint32_t n_recent;
    uint32_t n_counted;
} qsf_last_choice;

/* The drafts that the latest pass evaluated after the session's tokens. Zeroed: none. */
typedef struct qsf_ahead {
    uint32_t n_drafts;
    uint32_t n_left;     /* the last n_left drafts: no step has confirmed them yet */
    bool has_likeliest;  /* buffers.likeliest has predictions that are not learned yet */
    const float *logits; /* [n_drafts, n_vocab], valid while the model's logits_pass is this: */
    uint64_t pass;
} qsf_ahead;

struct qsf_session {
    qsf_model *model;
    qsf_session_buffers buffers;
    uint32_t n_tokens; /* evaluated */
    bool has_logits;
    qsf_ahead ahead;
    uint32_t n_offered;       /* drafts of the caller for the next pass of a step */
    uint32_t n_model_guesses; /* guesses of the latest pass, evaluated or not */
    uint32_t mtp_position;    /* of the chain's latest guess from hidden states; 0: none */
    qsf_session *drafter;     /* of the draft model, or NULL: it has none, or reads this one */
    float adapter_scales[QSF_MAX_ADAPTERS]; /* of the model's adapters; 0: it does not change it */
    qsf_last_choice last_choice;            /* the draft model imitates it */
    qsf_chances chances;
    qsf_speculation_chain chain;
    qsf_state incoming;        /* the state being restored */
    uint64_t n_incoming_bytes; /* its bytes so far; 0: none, or the restoring failed */
    atomic_bool cancelled;     /* set by any thread */
    qsf_stopwatch stopwatch;   /* of the running call, or of the latest */
    qsf_stats stats;           /* its own numbers; qsf_session_stats fills in the others */
    void *memory;              /* of the buffers */
    size_t memory_bytes;
};

/* Releases KV blocks without a position below n_tokens. */
void qsf_session_trim(qsf_session *s, uint32_t n_tokens);

/* The session holds the first n_tokens of its buffer from now on. Forgets the drafts after its
 * tokens, and its logits if it held another number of tokens. */
void qsf_session_keep(qsf_session *s, uint32_t n_tokens);

/* QSF_ERR_ARG: nothing was evaluated yet, or the session was rewound. */
qsf_status qsf_session_check_logits(const qsf_session *s);

/* ---- the pass ---- */

/* QSF_ERR_ARG: n_tokens exceed the context, or one is outside the vocabulary. */
qsf_status qsf_pass_check_tokens(const qsf_model *m, const uint32_t *tokens, size_t n_tokens);

/* Evaluates the tokens of all parts; call it under the model's lock, with a stopwatch that was
 * started. If the pass succeeded and the session was not cancelled, a part's session receives the
 * part's tokens, and the last row as its logits; each part has a status then. After an error of
 * the whole pass no session holds other tokens. Parts with rows: at most logits_rows in all, or
 * only one part. */
qsf_status qsf_pass_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w);

/* Adds n / n_all of the stopwatch's phases to the session's, after ending its last lap. */
void qsf_pass_count_phases(qsf_session *s, qsf_stopwatch *w, uint64_t n, uint64_t n_all);

/* ---- drafts of the next tokens, evaluated in the pass of the token before them ---- */

/* Call these functions under the model's lock. */

/* True if the token is already evaluated as the session's next one. */
bool qsf_drafting_has(const qsf_session *s, uint32_t token);

/* Appends the next draft, which qsf_drafting_has() has confirmed, to the session's tokens.
 * QSF_ERR_CANCELLED. */
qsf_status qsf_drafting_take(qsf_session *s);

/* Learns from the session's next token, before it is taken or evaluated. The n-gram table learns
 * the latest pass's predictions here, after its guesses were counted; if the token is not a
 * draft, the rows being dropped teach it too. */
void qsf_drafting_learn(qsf_session *s, uint32_t token);

/* Does what qsf_pass_run() does, and also evaluates drafts after the parts that allow them, each
 * with a row of logits: the most probable drafts of all parts, as long as they promise to save
 * time. */
qsf_status qsf_drafting_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w);

/* ---- a model ---- */

struct qsf_model {
    /* written once before open returns */
    qsf_model *drafter;     /* draft model of this one, which owns it; NULL: none */
    bool is_drafter;        /* a draft model, which uses the thread pool of its target */
    bool has_table_on_disk; /* see qsf_plan_input */
    qsf_reader reader;
    qsf_config config;
    qsf_ends ends;
    qsf_kernels kernels;
    qsf_options options; /* values chosen for all fields that were 0 */
    qsf_plan plan;       /* fields that depend on resident units change under lock */
    qsf_sysmem memory;   /* of the system and this process, before open */
    qsf_adapter adapters[QSF_MAX_ADAPTERS];
    uint32_t n_adapters; /* that are opened */
    void *adapters_memory;
    qsf_pool *pool;
    qsf_forward forward;
    qsf_rows_source source; /* of a stage that is not the first; else NULL */
    void *source_arg;
    atomic_bool is_deaf; /* the source is asked for a pass that no cancelled session may end */
    qsf_io io;
    qsf_io_setup io_setup;
    /* under lock */
    qsf_mutex lock;
    qsf_ledger ledger;
    qsf_stream stream;
    qsf_experts experts;
    qsf_scratch scratch;
    qsf_shared_buffers shared; /* its sampler: under `choosing` */
    qsf_pressure pressure;
    qsf_sequence_pools
        pools; /* blocks in use: under kv_lock, the last lock in the order of locks */
    uint64_t full_ring_bytes; /* ring_bytes of the plan at open */
    uint32_t n_sessions;
    uint32_t n_created; /* sessions so far */
    bool is_closed;
    /* allocations from the ledger; the plan does not count all of them */
    void *tables_memory;
    size_t tables_memory_bytes;
    void *embedding_memory;
    size_t embedding_memory_bytes;
    void *scratch_memory;
    size_t scratch_memory_bytes;
    void *kv_memory;
    size_t kv_memory_bytes;
    qsf_layer *layers; /* [n_layers] */
    size_t layers_bytes;
    bool *is_resident; /* [n_stream_units] */
    size_t is_resident_bytes;
    qsf_mutex choosing; /* taken for a choice; never waits for a pass */
    qsf_mutex kv_lock;  /* protects the pools' blocks and slots, not their contents */
};

/* Releases all memory of a model, even if it is only partly open. qsf_model_close calls it once
 * no session is left. */
void qsf_model_release(qsf_model *m);

/* Removes one session from the count. Destroys a closed model with its last session. Call
 * without the lock. */
void qsf_model_forget_session(qsf_model *m);

/* ---- opening: options, file, plan, memory ---- */

/* For tests: the N-th allocation or read of open fails (negative: none does), and process_bytes
 * replaces the measured memory of the process (0: measure). */
typedef struct qsf_faults {
    int64_t grants_until_fault;
    int64_t reads_until_fault;
    uint64_t process_bytes;
} qsf_faults;

/* qsf_model_open with faults, which may be NULL. The options have been checked. */
qsf_status qsf_model_create(const char *path, const qsf_options *opt, const qsf_faults *faults,
                            qsf_model **out);

/* ---- the options ---- */

/* QSF_ERR_ARG names the option that is out of range. */
qsf_status qsf_options_check(const qsf_options *opt);

/* ---- adapters of low rank ---- */

/* Opens those of the options, for the file at base_path; it is read. */
qsf_status qsf_adapters_open(qsf_model *m, const char *base_path);

/* Bytes of all that are open. */
uint64_t qsf_adapters_bytes(const qsf_model *m);

/* Columns of qsf_config.low_cols. */
uint32_t qsf_adapters_cols(const qsf_model *m);

/* Takes the planned memory, and adds the adapters to the model's layers. */
qsf_status qsf_adapters_load(qsf_model *m);

/* Returns a checksum of the adapters and their scales; 0: none. */
uint32_t qsf_adapters_check(const qsf_model *m);

/* Closes the files and releases the memory. */
void qsf_adapters_release(qsf_model *m);

/* ---- which layers are skipped for speed (qsf_options.quality) ---- */

/* Of n layers, round((1 - quality) * n) are skipped: 0.9, 0.8 and 0.7 skip 10, 20 and 30 %. The
 * first two and the last two always run, so quality 0 skips all the others. The least important
 * layers are skipped first, by the importances of the file (docs/format.md); of equally important
 * ones the nearest to the middle of the model, then the first. So a smaller quality skips the
 * layers of a larger one, and more.
 *
 * The rest of the engine sees a skipped layer as one that the file does not have
 * (qsf_reader_leave_out). */

/* Sets the entries of is_skipped [n_layers of the header] that are skipped. QSF_ERR_ARG: quality is
 * below 1, but the file has no importances (all are equal) or the model has no layer that may be
 * skipped. */
qsf_status qsf_skip_layers(const qsf_reader *r, double quality, bool *is_skipped);

/* Fills in the plan's fields on skipped layers. */
void qsf_skip_describe(const qsf_reader *r, double quality, qsf_plan *plan);

/* ---- vocabularies ---- */

/* QSF_ERR_ARG with the first difference, unless all ids that both files have are the same
 * tokens. Needs the memory of both vocabularies meanwhile, unless they are equal byte for byte. */
qsf_status qsf_drafter_check_tokens(qsf_reader *model, qsf_reader *drafter);

/* ---- giving memory of an open model back to the system, and taking it again ---- */

/* Evicts resident units, which are streamed from then on: slower, with the same results. The
 * smallest plan is the limit, so that the system does not kill this process. qsf_model.plan is
 * kept up to date. The caller holds the model's lock, between two units. */

typedef struct qsf_memory_move {
    bool has_disturbed; /* units of the stream moved, or the ring was restarted */
    bool is_done;       /* if false, nothing changed and the caller may try again */
    uint64_t n_bytes;
} qsf_memory_move;

/* Releases wanted_bytes, or as much as possible: first slots of experts, then units, then most
 * of the ring. */
qsf_memory_move qsf_model_give(qsf_model *m, uint64_t wanted_bytes);

/* Takes one step back towards the plan if it costs at most room_bytes: first the ring, because
 * passes without read-ahead are slow, then one unit. */
qsf_memory_move qsf_model_take(qsf_model *m, uint64_t room_bytes);

/* Returns the cost of the next qsf_model_take; 0: nothing was released. */
uint64_t qsf_model_next_cost_bytes(const qsf_model *m);

/* ---- measures the system's memory and moves the model's, as plan.h decides ---- */

/* Takes the first measurement. The model is open. */
void qsf_pressure_begin(qsf_model *m);

/* Takes a measurement if one is due, and moves memory. The caller holds the model's lock,
 * between two units. True: units of the stream moved. */
bool qsf_pressure_watch(qsf_model *m);
