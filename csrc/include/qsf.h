/* qsf.h - the public C API of the QSF engine; the only header an application includes.
 *
 * A model is opened from one .qsf file inside a memory budget and shared by any
 * number of sessions. A session holds one token sequence and its KV cache. It is
 * synchronised to a token list: the caller always names the whole sequence, the
 * engine keeps the common prefix and evaluates the rest.
 *
 * True of every function here unless its comment says otherwise:
 *   - It returns QSF_OK or a negative qsf_status; qsf_error_detail() then explains.
 *   - *_open and *_create give the caller ownership; the matching *_close or
 *     *_destroy takes it back, accepts NULL and cannot fail.
 *   - Handles may be closed in any order: a model lives until its last session is gone.
 *   - Pointers passed in are borrowed until the call returns, never kept (but for a trace's).
 *   - Sizes are bytes unless the name says tokens, rows, floats or layers.
 *   - A qsf_model may be shared between threads; its sessions take turns inside.
 *     A qsf_session may be used by one thread at a time, except for
 *     qsf_session_cancel().
 *   - Nothing is printed, no signal is touched, the process is never ended.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_H
#define QSF_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define QSF_API
#elif defined(__GNUC__)
#define QSF_API __attribute__((visibility("default")))
#else
#define QSF_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- cdef begin ---- (what follows is also read by cffi: declarations and
 * integer #defines only, no #if, no inline functions) */

#define QSF_API_VERSION 1
#define QSF_BUDGET_AUTO 0xFFFFFFFFFFFFFFFF /* a budget of what the machine can well give */
#define QSF_TOKEN_NONE 0xFFFFFFFF          /* "no such token" in qsf_model_info */
#define QSF_SKIP_WORDS 64        /* of 64 bits: one for every layer that a file may have */
#define QSF_N_PHASES 11          /* of qsf_phase */
#define QSF_UNIT_NONE 0xFFFFFFFF /* "no unit of the file" in qsf_trace_event */

typedef enum qsf_status {
    QSF_OK = 0,
    QSF_ERR_ARG = -1,         /* the caller broke a documented rule */
    QSF_ERR_NOMEM = -2,       /* the request does not fit the memory budget */
    QSF_ERR_IO = -3,          /* the system refused an open or a read */
    QSF_ERR_FORMAT = -4,      /* the file is damaged or not a QSF file */
    QSF_ERR_UNSUPPORTED = -5, /* well formed, but not what this build reads */
    QSF_ERR_CANCELLED = -6,   /* qsf_session_cancel() was called */
    QSF_ERR_NUMERIC = -7      /* the model produced NaN or infinity */
} qsf_status;

typedef struct qsf_model qsf_model;
typedef struct qsf_session qsf_session;

/* ---- library ---- */

/* The version of the library, such as "0.1.0". Never NULL; a static string. */
QSF_API const char *qsf_version(void);

/* The name of a status, such as "QSF_ERR_FORMAT". Never NULL; a static string. */
QSF_API const char *qsf_status_name(qsf_status status);

/* What went wrong in the last failing call made by this thread, for people to
 * read. Never NULL; valid until this thread's next QSF call. */
QSF_API const char *qsf_error_detail(void);

/* What the engine would run with on this machine. */
typedef struct qsf_machine {
    char isa_name[16];        /* kernels that will be used: "scalar", "avx2", "avx512" */
    char isa_available[64];   /* space-separated: what QSF_ISA may name here */
    uint32_t n_cores;         /* physical cores this process may run on */
    uint64_t memory_bytes;    /* total, or the cgroup's limit where lower */
    uint64_t available_bytes; /* what the system says may still be taken */
    uint64_t resident_bytes;  /* this process now */
    uint64_t peak_bytes;      /* this process at most so far */
} qsf_machine;

/* Fails with QSF_ERR_ARG when the environment variable QSF_ISA names an
 * instruction set that does not exist or that this machine lacks. */
QSF_API qsf_status qsf_machine_describe(qsf_machine *out);

/* The machine's limits, as far as a program can measure them. */
typedef struct qsf_roofline {
    double read_bytes_per_s; /* from memory, of all threads together */
    double madds_per_s;      /* 8-bit multiply-adds of all threads, with the instruction set that
                              * would be used; 0 where that has no such loop (scalar, neon) */
} qsf_roofline;

/* Measures each of the two for about n_ms (1 .. 60000), best of many passes, on n_threads (1 ..
 * 256; the caller's is one). n_bytes of memory are taken for it, in huge pages where the system
 * has some: at least 64 MiB and at least 1 MiB a thread, and several times the last cache for the
 * result to mean anything; each thread reads a part of its own. QSF_ERR_NOMEM when the system
 * has less. Computing beside it makes both results smaller. */
QSF_API qsf_status qsf_machine_roofline(uint32_t n_threads, uint64_t n_bytes, uint32_t n_ms,
                                        qsf_roofline *out);

/* ---- model ---- */

/* Bits of a number in the KV cache. 2, 4 and 8: in blocks of 64 with a scale. */
typedef enum qsf_kv_type {
    QSF_KV_DEFAULT = 0, /* 4 bits; 32 when exact; 2 where memory is too short for 4 */
    QSF_KV_2BIT = 2,
    QSF_KV_4BIT = 4,
    QSF_KV_8BIT = 8,
    QSF_KV_F16 = 16,
    QSF_KV_F32 = 32
} qsf_kv_type;

/* Turning keys and values by a Hadamard matrix spreads outliers over the head, for the good of
 * types of few bits. Heads of 16, 32, .. 4096 dimensions can be turned. */
typedef enum qsf_kv_rotation {
    QSF_KV_ROTATION_AUTO = 0, /* with 4 bits or fewer and heads of 16 to 256 dimensions */
    QSF_KV_ROTATION_OFF = 1,
    QSF_KV_ROTATION_ON = 2 /* QSF_ERR_ARG where the heads cannot be turned */
} qsf_kv_rotation;

/* How weights are read from the file. */
typedef enum qsf_io_method {
    QSF_IO_AUTO = 0,     /* buffered where the page cache holds, or can come to hold, what is read;
                          * else direct or uring, whichever a short probe finds faster */
    QSF_IO_BUFFERED = 1, /* pread through the page cache */
    QSF_IO_DIRECT = 2,   /* pread past the page cache */
    QSF_IO_URING = 3,    /* io_uring past the page cache */
    QSF_IO_MMAP = 4      /* copied from a mapping of the file, with advice to the page cache */
} qsf_io_method;

/* Starts from qsf_options_default(), never from an uninitialised struct. */
typedef struct qsf_options {
    uint64_t budget_bytes;  /* ceiling for the whole process; 0: what the machine has left;
                             * QSF_BUDGET_AUTO: that, less a share for others */
    uint64_t reserve_bytes; /* part of the budget that the caller keeps for itself */
    uint32_t n_threads;     /* 0: one per physical core */
    uint32_t ctx_tokens;    /* longest sequence a session may hold; 0: the model's, at most 4096,
                             * less where the budget is small */
    uint32_t chunk_tokens;  /* most prompt tokens evaluated together; 0: chosen by the plan */
    uint32_t max_sessions;  /* sessions that may be open at once; their caches are in the plan */
    uint32_t pin_threads;   /* 1: each thread that the engine starts stays on a physical core of
                             * its own (Linux); QSF_ERR_ARG where there are not so many. Never
                             * changes the calling thread */
    uint32_t exact; /* 1: f32 activations and f32 KV cache, plain kernels (slow, for reference) */
    uint32_t kv_k_type;   /* a qsf_kv_type, of the keys; exact takes no other than 32 bits */
    uint32_t kv_v_type;   /* of the values */
    uint32_t kv_rotation; /* a qsf_kv_rotation */
    uint32_t io_method;   /* a qsf_io_method; QSF_ERR_UNSUPPORTED where it cannot be had */
    uint32_t io_depth;    /* reads under way at the same time, at most 32; 0: chosen */
    /* What the probe of QSF_IO_AUTO found earlier on the same disk (qsf_model_facts), so that it
     * need not be made again; 0: nothing is known. */
    uint32_t io_known_method;
    uint32_t io_known_depth;
    /* Below 1, layers are skipped, the least important first: (1 - quality) * n_layers of them,
     * rounded to the nearest, but never the first two or the last two. They are neither read nor
     * kept in memory and have no KV cache. QSF_ERR_ARG where the file has no importance of layers
     * (all are equal), or no more than four layers. */
    double quality;
} qsf_options;

QSF_API void qsf_options_default(qsf_options *out);

/* Where the memory goes, decided before any of it is taken. Sums: engine_bytes is
 * the total of the parts named *_bytes below it. */
typedef struct qsf_plan {
    uint64_t budget_bytes;     /* as asked, or what was found for QSF_BUDGET_AUTO; 0: none */
    uint64_t ceiling_bytes;    /* what the plan stays below: the budget, or less where the machine
                                * or a control group has no more to give; 0: no ceiling */
    uint64_t process_bytes;    /* resident before the model was opened */
    uint64_t reserve_bytes;    /* kept for the caller */
    uint64_t engine_bytes;     /* all that the engine will allocate */
    uint64_t weights_bytes;    /* resident units, of model_bytes */
    uint64_t window_bytes;     /* through which the other units pass */
    uint64_t ring_bytes;       /* of window_bytes: how far reading runs ahead of computing */
    uint64_t embedding_bytes;  /* where the embedding table is not resident: one band of it, and
                                * the cache of rows */
    uint64_t kv_bytes;         /* KV pages of all sessions */
    uint64_t scratch_bytes;    /* activations of one prompt chunk, logits, sampling */
    uint64_t tables_bytes;     /* index, positions, session and thread records */
    uint64_t stacks_bytes;     /* of the worker threads */
    uint64_t model_bytes;      /* raw bytes of all n_units */
    uint64_t streamed_bytes;   /* read from the file for every token */
    uint64_t min_budget_bytes; /* the smallest budget_bytes with which this call would succeed */
    uint32_t n_units;          /* embedding, layers that are not skipped, final */
    uint32_t n_units_resident;
    uint32_t ctx_tokens;
    uint32_t chunk_tokens;
    uint32_t n_threads;
    uint32_t max_sessions;
    uint32_t kv_k_bits; /* of a key in the KV cache, a qsf_kv_type; 32 and 16 are floats */
    uint32_t kv_v_bits;
    uint32_t kv_is_rotated;  /* 0 or 1 */
    uint32_t io_depth;       /* reads under way at the same time; 0: nothing is streamed */
    uint32_t embedding_rows; /* in the cache; 0: there is none */
    /* Skipped layers (qsf_options.quality) count in none of the above. */
    uint32_t n_layers; /* of the file */
    uint32_t n_layers_skipped;
    uint32_t n_skips_asked; /* what the quality asked for; more than n_layers_skipped where the
                             * layers that are always kept did not allow it */
    uint64_t skipped_layers[QSF_SKIP_WORDS]; /* layer i: bit i % 64 of word i / 64 */
} qsf_plan;

/* What opening would take, without taking it. Where the budget is too small it
 * returns QSF_ERR_NOMEM, and *out still says what would be needed. */
QSF_API qsf_status qsf_model_plan(const char *path, const qsf_options *opt, qsf_plan *out);

/* Opens `path` (UTF-8), plans memory, and reads and verifies the units that stay
 * resident. On failure *out is NULL and nothing is held. */
QSF_API qsf_status qsf_model_open(const char *path, const qsf_options *opt, qsf_model **out);
QSF_API void qsf_model_close(qsf_model *m);

typedef struct qsf_model_facts {
    char architecture[16]; /* "gpt2", "llama", "mistral" */
    char quant_type[16];   /* default type of the file, such as "4bit" */
    char isa_name[16];     /* kernels in use */
    char io_name[16];      /* how weights are read, such as "direct" */
    uint32_t io_method;    /* the same, a qsf_io_method */
    uint32_t io_depth;     /* reads under way at the same time */
    uint32_t io_is_probed; /* 1: found by a probe, good for io_known_method */
    uint32_t n_layers;
    uint32_t dim;
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t ffn_dim;
    uint32_t n_vocab;
    uint32_t max_tokens; /* the longest sequence the model was made for */
    uint32_t bos_id;     /* or QSF_TOKEN_NONE, as the two below */
    uint32_t eos_id;
    uint32_t pad_id;
    uint64_t n_parameters;
    uint64_t file_bytes;
    qsf_plan plan; /* what was decided and is now held */
} qsf_model_facts;

/* Leaves *out alone when m is NULL. */
QSF_API void qsf_model_info(const qsf_model *m, qsf_model_facts *out);

/* Bytes of the section `tag` ("META", "TOKN", "CHAT"); 0 when the file has none. */
QSF_API uint64_t qsf_model_section_bytes(const qsf_model *m, const char *tag);

/* Reads a section into `dst` and verifies its checksum. QSF_ERR_ARG when it does
 * not exist or cap_bytes is too small. */
QSF_API qsf_status qsf_model_section(qsf_model *m, const char *tag, void *dst, uint64_t cap_bytes);

/* Reads the whole file and checks every stored byte's checksum and every padding
 * byte, in 1 MiB of memory. */
QSF_API qsf_status qsf_file_verify(const char *path);

/* ---- session ---- */

/* QSF_ERR_NOMEM when max_sessions of the options are open already. */
QSF_API qsf_status qsf_session_create(qsf_model *m, qsf_session **out);
QSF_API void qsf_session_destroy(qsf_session *s);

/* Moves the session towards holding exactly `tokens`: drops what differs, then
 * evaluates at most one chunk of what is missing. *n_done is how many of the tokens
 * are evaluated now; call again until it equals n_tokens. The last token is always
 * evaluated in such a call, so that its logits are there. n_tokens >= 1.
 * QSF_ERR_ARG: a token outside the vocabulary, or more tokens than ctx_tokens.
 * QSF_ERR_CANCELLED, QSF_ERR_IO, QSF_ERR_FORMAT: the session holds the tokens it
 * held before the chunk, and goes on working. */
QSF_API qsf_status qsf_session_sync(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                                    size_t *n_done);

/* As sync, and writes the logits after each token evaluated by this call to
 * `logits` [n_tokens - first_row, n_vocab], row i for tokens[first_row + i]: tokens before
 * first_row cost no head, and none at all where the session holds them. Starts at the first
 * row not yet scored: call with *n_done = 0 first, then again until it equals n_tokens. */
QSF_API qsf_status qsf_session_score(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                                     size_t first_row, float *logits, size_t cap_floats,
                                     size_t *n_done);

/* Evaluates one token after those the session holds. Allocates nothing. */
QSF_API qsf_status qsf_session_step(qsf_session *s, uint32_t token);

/* How many tokens the session holds. */
QSF_API size_t qsf_session_position(const qsf_session *s);

/* Forgets all but the first n_tokens. The logits are gone until the next step or sync. */
QSF_API qsf_status qsf_session_rewind(qsf_session *s, size_t n_tokens);

/* Makes the running sync, score or step of this session return QSF_ERR_CANCELLED
 * before its next layer, or the next one if none is running. The one function that
 * another thread, or a signal handler, may call at any time. */
QSF_API void qsf_session_cancel(qsf_session *s);

/* ---- results ---- */

/* Copies the logits [n_vocab] after the last token. QSF_ERR_ARG when there are none
 * (nothing evaluated yet, or rewound) or cap_floats < n_vocab. */
QSF_API qsf_status qsf_session_logits(const qsf_session *s, float *out, size_t cap_floats);

/* How to choose a token. The steps are applied in the order of the fields. */
typedef struct qsf_sampling {
    float repetition_penalty; /* > 0; 1: off. Divides positive, multiplies negative logits */
    float temperature;        /* >= 0; 0: the largest logit, lowest id first */
    uint32_t top_k;           /* 0: off */
    float top_p;              /* (0, 1]; 1: off */
    float min_p;              /* [0, 1]; 0: off. Relative to the most probable token */
} qsf_sampling;

/* The plan's defaults: temperature 0.7, top_k 40, top_p 0.9, the rest off. */
QSF_API void qsf_sampling_default(qsf_sampling *out);

/* Chooses the next token from the session's logits, which stay as they are.
 * `recent` [n_recent]: the tokens that the repetition penalty applies to.
 * *random_state: the generator's, advanced by one draw unless temperature is 0.
 * The same logits, parameters and state give the same token on every machine.
 * QSF_ERR_NUMERIC when a logit is NaN or infinite. */
QSF_API qsf_status qsf_session_sample(qsf_session *s, const qsf_sampling *how,
                                      const uint32_t *recent, size_t n_recent,
                                      uint64_t *random_state, uint32_t *token);

/* What the computing thread does in a call of sync, score or step: each nanosecond of it belongs
 * to exactly one of these. */
typedef enum qsf_phase {
    QSF_PHASE_EMBEDDING = 0, /* rows of the embedding, positions, RoPE tables */
    QSF_PHASE_NORM = 1,      /* norms, and rounding what they give to integers */
    QSF_PHASE_QKV = 2,       /* Q, K, V with bias, RoPE and the KV store. As the other products:
                              * with their side tables, and up to when the slowest thread is done */
    QSF_PHASE_ATTENTION = 3,
    QSF_PHASE_ATTN_OUT = 4,   /* rounding of the attended, its matrix, the residual */
    QSF_PHASE_GATE_UP = 5,    /* gate and up, or up alone, with the activation */
    QSF_PHASE_DOWN = 6,       /* rounding of the activated, down, the residual, the layer's end */
    QSF_PHASE_HEAD = 7,       /* logits */
    QSF_PHASE_WAIT = 8,       /* for the disk, in whichever of the above it falls */
    QSF_PHASE_DECOMPRESS = 9, /* likewise, of compressed units */
    QSF_PHASE_OTHER = 10      /* checking arguments, other sessions' turns, watching memory,
                               * beginning streamed units */
} qsf_phase;

/* The short name of a phase, such as "qkv"; "unknown" from QSF_N_PHASES on. Never NULL; a static
 * string. */
QSF_API const char *qsf_phase_name(uint32_t phase);

typedef struct qsf_stats {
    uint64_t prompt_tokens; /* evaluated by sync and score */
    uint64_t prompt_ns;
    uint64_t step_tokens; /* evaluated by step */
    uint64_t step_ns;
    uint64_t read_bytes;      /* weights read from the file since open */
    uint64_t read_ns;         /* during which at least one read of streamed weights was under way */
    uint64_t wait_ns;         /* computing waited for streamed weights */
    uint64_t checksum_ns;     /* spent on checksums, in the reading threads */
    uint64_t decompress_ns;   /* spent on decompressing */
    uint64_t n_allocations;   /* requests to the allocator since open */
    uint64_t allocated_bytes; /* held now by the engine */
    uint64_t kv_used_bytes;   /* of this session's pages */
    /* of the model since open: loops over rows or tokens, those of them that were shared
     * between threads and so ended in waiting for the slowest, and the time in those */
    uint64_t n_loops;
    uint64_t n_parallel_regions;
    uint64_t parallel_ns;
    /* rows of an embedding table that is not resident: asked for, and found in the cache */
    uint64_t n_embedding_rows;
    uint64_t n_embedding_hits;
    /* under memory pressure: times and bytes given back to the system, and taken again */
    uint64_t n_given_back;
    uint64_t n_taken_again;
    uint64_t given_back_bytes;
    uint64_t taken_again_bytes;
    /* of this session's calls that are in prompt_ns and step_ns (those that failed are in
     * neither), by qsf_phase; their sum is the sum of those two */
    uint64_t phase_ns[QSF_N_PHASES];
    uint64_t sample_ns; /* in qsf_session_sample */
    uint64_t n_samples; /* tokens that it chose */
} qsf_stats;

/* Leaves *out alone when s is NULL. */
QSF_API void qsf_session_stats(const qsf_session *s, qsf_stats *out);

/* One unit's share of the passes since open. Reading runs ahead of computing, so the times of
 * neighbours overlap. */
typedef struct qsf_unit_time {
    uint64_t n_passes;   /* how often it was used */
    uint64_t read_bytes; /* from the file, in those */
    uint64_t read_ns;    /* from the start of its first read to the end of its last */
    uint64_t wait_ns;    /* computing waited for it */
    uint64_t compute_ns; /* the rest of the time from its beginning to its end */
    uint32_t is_resident;
    uint32_t is_skipped; /* and so all the rest is 0 */
} qsf_unit_time;

/* Fills out [cap_units] for the units of the file (embedding, layers, final), skipped ones too, and
 * returns how many there are. */
QSF_API size_t qsf_model_timeline(qsf_model *m, qsf_unit_time *out, size_t cap_units);

/* Memory that was given back under pressure, or taken again. */
typedef struct qsf_memory_event {
    uint64_t seconds;          /* since open */
    uint64_t bytes;            /* how much */
    uint64_t available_bytes;  /* what the system had left before */
    uint32_t is_given_back;    /* 0: taken again */
    uint32_t n_units_resident; /* afterwards */
} qsf_memory_event;

/* Fills out [cap_events] with the latest events, oldest first; returns how many are filled. */
QSF_API size_t qsf_model_memory_events(qsf_model *m, qsf_memory_event *out, size_t cap_events);

/* ---- tracing ---- */

/* Kinds of events: a qsf_phase, or one of these. */
typedef enum qsf_trace_kind {
    QSF_TRACE_PASS = 11,     /* a whole forward pass, from when it is this session's turn */
    QSF_TRACE_READ = 12,     /* one read of a reading thread, which may have several under way */
    QSF_TRACE_CHECKSUM = 13, /* of what was read */
    QSF_TRACE_SAMPLE = 14    /* choosing a token */
} qsf_trace_kind;

/* The name of a kind, such as "qkv" or "read"; "unknown" where there is none. Never NULL; a
 * static string. */
QSF_API const char *qsf_trace_kind_name(uint32_t kind);

/* Times are those of the system's monotonic clock (CLOCK_MONOTONIC). */
typedef struct qsf_trace_event {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t n_bytes;    /* read, checked, waited for or decompressed; else 0 */
    uint32_t kind;       /* a qsf_phase or a qsf_trace_kind */
    uint32_t unit_idx;   /* as in qsf_model_timeline; QSF_UNIT_NONE for what is of no unit */
    uint32_t thread_idx; /* 0: whoever calls; from 1 on: the threads that read */
    uint32_t n_tokens;   /* of the chunk; 0 in threads that read */
} qsf_trace_event;

/* From now on the events of the model and its sessions are written to events [cap_events], in
 * the order in which each thread ends them, until it is full; those that come then are dropped.
 * Waits and decompressing lie inside events of other phases, and these inside a pass, but for
 * QSF_PHASE_OTHER before and after it; waits of less than a microsecond are left out. The memory
 * is the one thing that is kept when a call returns: until the next call, which begins anew, or
 * ends the trace if events is NULL, or until qsf_model_close. After that no thread touches it.
 * QSF_ERR_ARG: no room for an event. */
QSF_API qsf_status qsf_model_trace(qsf_model *m, qsf_trace_event *events, size_t cap_events);

/* How many events were written by the trace, or when it has ended by the latest one;
 * *n_dropped, unless NULL: how many were not, because the memory was full. */
QSF_API size_t qsf_model_trace_count(qsf_model *m, uint64_t *n_dropped);

/* ---- for converters: matrices to the tiles of a file ---- */

#define QSF_RULE_SEARCH 0  /* scales and mins of the least squared error that a search finds */
#define QSF_RULE_NEAREST 1 /* plain: spread over the range, or up to the largest magnitude */
#define QSF_RULE_SCALE 2   /* ternary types: one given scale for all blocks */

/* How a matrix is rounded (docs/format.md, section 5). */
typedef struct qsf_rounding {
    uint32_t dtype;       /* the id of a type that tensors have */
    uint32_t rule;        /* QSF_RULE_*; f16 and f32 have no use for it */
    float scale;          /* of QSF_RULE_SCALE, 0 .. 65504; rounded to f16 */
    const float *weights; /* [n_cols]: how much the squared error of a column counts, finite and
                           * >= 0; NULL: all alike. Blocks with none but 0 count all alike too. */
} qsf_rounding;

/* What rounding did, summed over all values. */
typedef struct qsf_rounding_sums {
    uint64_t n_values;
    uint64_t bad_row; /* after QSF_ERR_NUMERIC: first of the 16 rows with a value that cannot be */
    double squared_error; /* (source - stored)^2 */
    double source_energy; /* source^2 */
    double stored_energy; /* stored^2 */
    double inner_product; /* source * stored */
    double max_error;     /* largest |source - stored| */
} qsf_rounding_sums;

/* Writes the tiles of rows [n_rows, n_cols]; cap_bytes is at least ceil(n_rows / 16) *
 * ceil(n_cols / 64) times the bytes of a tile. stored [n_rows, n_cols], unless NULL, gets the
 * values they stand for. The bits do not depend on the instruction set, nor on how a matrix is
 * cut into calls (between multiples of 16 rows). Any number of threads may call at once.
 * QSF_ERR_NUMERIC: a value is not finite, or too large for a scale or min of the type. */
QSF_API qsf_status qsf_quantise_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                                     size_t n_cols, void *tiles, size_t cap_bytes, float *stored,
                                     qsf_rounding_sums *sums);

/* Floats that qsf_feedback_rows() works in; 0 for more columns than a matrix may have. */
QSF_API size_t qsf_feedback_work_floats(size_t n_cols);

/* As quantise, but column by column: what rounding a column loses is made up for by those that
 * come after it (GPTQ, Frantar et al. 2022). order [n_cols] says which column comes k-th: each
 * once, those of a block of 64 one after the other. factor [n_cols, n_cols], in that order, is
 * the upper triangular U with U^T U = the inverse of the (damped) second moments of the inputs;
 * below its diagonal nothing is read. work [cap_floats] is scratch. The sums compare with `rows`.
 * QSF_ERR_ARG: an order that is none, a diagonal not above 0, a type without codes.
 * QSF_ERR_NUMERIC: as quantise, or the values grew out of bounds: more damping is needed. */
QSF_API qsf_status qsf_feedback_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                                     size_t n_cols, const float *factor, const int32_t *order,
                                     float *work, size_t cap_floats, void *tiles, size_t cap_bytes,
                                     float *stored, qsf_rounding_sums *sums);

/* ---- cdef end ---- */

#ifdef __cplusplus
}
#endif

#endif
