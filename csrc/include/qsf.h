/* qsf.h - the public C API of the QSF engine; an application includes only this header.
 *
 * A model is opened from one .qsf file inside a memory budget. Any number of sessions share
 * it. A session holds one sequence of tokens and its KV cache. The caller passes the whole
 * sequence each time; the engine keeps the common prefix and evaluates the rest.
 *
 * These rules hold for every function unless its comment says otherwise:
 *   - A function returns QSF_OK or a negative qsf_status. After an error, qsf_error_detail()
 *     returns a text that explains it.
 *   - *_open and *_create give the caller ownership. The matching *_close or *_destroy
 *     releases it, accepts NULL and cannot fail.
 *   - Handles may be closed in any order. A model stays alive until its last session is
 *     destroyed.
 *   - The engine uses a pointer argument only until the call returns. The one exception is
 *     the memory of a trace, see qsf_model_trace().
 *   - Sizes are in bytes unless the name says tokens, rows, floats or layers.
 *   - Several threads may share a qsf_model; their sessions take turns. Only one thread at
 *     a time may use a qsf_session, except for qsf_session_cancel().
 *   - The engine prints nothing, changes no signal handler and never ends the process.
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

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

#define QSF_API_VERSION 1
#define QSF_BUDGET_AUTO 0xFFFFFFFFFFFFFFFF /* budget_bytes: what the machine can spare */
#define QSF_TOKEN_NONE 0xFFFFFFFF          /* "no such token" in qsf_model_info */
#define QSF_SKIP_WORDS 64        /* words of 64 bits; one bit for each layer that a file may have */
#define QSF_N_PHASES 11          /* number of values of qsf_phase */
#define QSF_UNIT_NONE 0xFFFFFFFF /* "no unit of the file" in qsf_trace_event */

typedef enum qsf_status {
    QSF_OK = 0,
    QSF_ERR_ARG = -1,         /* the caller broke a documented rule */
    QSF_ERR_NOMEM = -2,       /* the request needs more memory than the budget allows */
    QSF_ERR_IO = -3,          /* the operating system reported an error when opening or reading */
    QSF_ERR_FORMAT = -4,      /* the file is damaged or not a QSF file */
    QSF_ERR_UNSUPPORTED = -5, /* the file is valid, but this build cannot read it */
    QSF_ERR_CANCELLED = -6,   /* qsf_session_cancel() was called */
    QSF_ERR_NUMERIC = -7      /* the model produced NaN or infinity */
} qsf_status;

typedef struct qsf_model qsf_model;
typedef struct qsf_session qsf_session;

/* ---- library ---- */

/* Returns the version of the library, such as "0.1.0": a static string, never NULL. */
QSF_API const char *qsf_version(void);

/* Returns the name of a status, such as "QSF_ERR_FORMAT": a static string, never NULL. */
QSF_API const char *qsf_status_name(qsf_status status);

/* Returns a text for people that explains the last error of this thread. It is never NULL and
 * stays valid until this thread calls QSF again. */
QSF_API const char *qsf_error_detail(void);

/* The instruction sets, processors and memory of this machine. */
typedef struct qsf_machine {
    char isa_name[16];        /* kernels that will be used, such as "avx2" */
    char isa_available[64];   /* names that QSF_ISA accepts here, separated by spaces */
    uint32_t n_cores;         /* physical cores that this process may use */
    uint64_t memory_bytes;    /* total, or the control group's limit if that is lower */
    uint64_t available_bytes; /* memory that the system says is available */
    uint64_t resident_bytes;  /* resident memory of this process now */
    uint64_t peak_bytes;      /* highest resident memory of this process so far */
} qsf_machine;

/* Describes this machine. Returns QSF_ERR_ARG if the environment variable QSF_ISA names an
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

/* Type of the numbers in the KV cache. Types of 2, 4 and 8 bits have a scale for 64 numbers. */
typedef enum qsf_kv_type {
    QSF_KV_DEFAULT = 0, /* 4 bits; keys 8 in heads below 128 dimensions; f32 if exact is 1 */
    QSF_KV_2BIT = 2,
    QSF_KV_4BIT = 4,
    QSF_KV_8BIT = 8,
    QSF_KV_F16 = 16,
    QSF_KV_F32 = 32
} qsf_kv_type;

/* Rotating keys and values by a Hadamard matrix spreads outliers over the head; types of few bits
 * then lose less. Heads of 16, 32, .. 4096 dimensions can be rotated. */
typedef enum qsf_kv_rotation {
    QSF_KV_ROTATION_AUTO = 0, /* on for 4 bits or fewer and heads of 16 to 256 dimensions */
    QSF_KV_ROTATION_OFF = 1,
    QSF_KV_ROTATION_ON = 2 /* QSF_ERR_ARG if the heads cannot be rotated */
} qsf_kv_rotation;

/* How weights are read from the file. */
typedef enum qsf_io_method {
    QSF_IO_AUTO = 0,     /* buffered if the page cache holds the file or has room for it; else
                          * direct or uring, whichever a short probe finds faster */
    QSF_IO_BUFFERED = 1, /* pread through the page cache */
    QSF_IO_DIRECT = 2,   /* pread past the page cache */
    QSF_IO_URING = 3,    /* io_uring past the page cache */
    QSF_IO_MMAP = 4      /* copied from a mapping of the file */
} qsf_io_method;

/* How to open a model. Fill it with qsf_options_default() before you set fields. */
typedef struct qsf_options {
    uint64_t budget_bytes;  /* most memory of the whole process; 0: all that the machine has
                             * left; QSF_BUDGET_AUTO: that, less a share for other processes */
    uint64_t reserve_bytes; /* part of the budget that the caller will use itself */
    uint32_t n_threads;     /* 0: one per physical core */
    uint32_t ctx_tokens;    /* longest sequence of a session; 0: the model's, at most 4096, less
                             * if the budget is small */
    uint32_t chunk_tokens;  /* most prompt tokens evaluated together; 0: the plan chooses */
    uint32_t max_sessions;  /* sessions that may be open at once; the plan includes their caches */
    uint32_t pin_threads;   /* 1: each thread that the engine starts stays on a physical core of
                             * its own (Linux); QSF_ERR_ARG if there are too few cores. The
                             * calling thread is never pinned */
    uint32_t exact;       /* 1: f32 activations, f32 KV cache, plain kernels: slow, for reference */
    uint32_t kv_k_type;   /* qsf_kv_type of the keys; if exact is 1, only QSF_KV_F32 */
    uint32_t kv_v_type;   /* qsf_kv_type of the values */
    uint32_t kv_rotation; /* a qsf_kv_rotation */
    uint32_t io_method;   /* a qsf_io_method; QSF_ERR_UNSUPPORTED if the system lacks it */
    uint32_t io_depth;    /* reads in flight at the same time, at most 32; 0: the engine chooses */
    /* Results of an earlier probe of the same disk (from qsf_model_facts), so that QSF_IO_AUTO does
     * not probe again; 0: none. */
    uint32_t io_known_method;
    uint32_t io_known_depth;
    /* Share of the layers that run, 0 to 1. (1 - quality) * n_layers, rounded to nearest, are
     * skipped, the least important first, but never the first two or the last two. Skipped
     * layers are not read and have no KV cache. QSF_ERR_ARG if the file does not say how
     * important its layers are, or has four layers or fewer. */
    double quality;
} qsf_options;

QSF_API void qsf_options_default(qsf_options *out);

/* The memory plan, made before any memory is taken. engine_bytes is the sum of the fields from
 * weights_bytes to stacks_bytes, without ring_bytes, which is part of stream_bytes. */
typedef struct qsf_plan {
    uint64_t budget_bytes;     /* from the options, or chosen for QSF_BUDGET_AUTO; 0: none */
    uint64_t ceiling_bytes;    /* the plan stays below this: the budget, or less if the machine or
                                * its control group has less left; 0: no ceiling */
    uint64_t process_bytes;    /* resident before the model was opened */
    uint64_t reserve_bytes;    /* the caller's own share, from the options */
    uint64_t engine_bytes;     /* all memory that the engine will allocate */
    uint64_t weights_bytes;    /* resident units; part of model_bytes */
    uint64_t stream_bytes;     /* buffers for units that are not resident */
    uint64_t ring_bytes;       /* part of stream_bytes: the buffer for reading ahead */
    uint64_t embedding_bytes;  /* one band and the cache of rows, if the embedding table is not
                                * resident */
    uint64_t kv_bytes;         /* KV pages of all sessions */
    uint64_t scratch_bytes;    /* activations of one prompt chunk, logits, sampling */
    uint64_t tables_bytes;     /* index, positions, session and thread records */
    uint64_t stacks_bytes;     /* of the worker threads */
    uint64_t model_bytes;      /* raw bytes of all n_units */
    uint64_t streamed_bytes;   /* bytes read from the file for every token */
    uint64_t min_budget_bytes; /* the smallest budget_bytes that works with these options */
    uint32_t n_units;          /* embedding, layers that are not skipped, final norm and head */
    uint32_t n_units_resident;
    uint32_t ctx_tokens;
    uint32_t chunk_tokens;
    uint32_t n_threads;
    uint32_t max_sessions;
    uint32_t kv_k_bits; /* bits of a key in the KV cache; 16 and 32 are floats */
    uint32_t kv_v_bits;
    uint32_t kv_is_rotated;  /* 0 or 1 */
    uint32_t io_depth;       /* reads in flight at the same time; 0: nothing is streamed */
    uint32_t embedding_rows; /* rows in the embedding cache; 0: no cache */
    /* The fields above do not count skipped layers (qsf_options.quality). */
    uint32_t n_layers; /* layers in the file */
    uint32_t n_layers_skipped;
    uint32_t n_skips_asked; /* layers that quality asked to skip; more than n_layers_skipped if
                             * some of them must always run */
    uint64_t skipped_layers[QSF_SKIP_WORDS]; /* layer i: bit i % 64 of word i / 64 */
} qsf_plan;

/* Makes the plan of qsf_model_open() without opening the model. If the budget is too small it
 * returns QSF_ERR_NOMEM, and out->min_budget_bytes says what is needed. */
QSF_API qsf_status qsf_model_plan(const char *path, const qsf_options *opt, qsf_plan *out);

/* Opens the file `path` (UTF-8), plans the memory, then reads and verifies the units that stay
 * resident. After an error *out is NULL and nothing is held. */
QSF_API qsf_status qsf_model_open(const char *path, const qsf_options *opt, qsf_model **out);
QSF_API void qsf_model_close(qsf_model *m);

typedef struct qsf_model_facts {
    char architecture[16]; /* "gpt2", "llama", "mistral", "phi", "other" */
    char quant_type[16];   /* default type of the file, such as "4bit" */
    char isa_name[16];     /* kernels in use */
    char io_name[16];      /* how weights are read, such as "direct" */
    uint32_t io_method;    /* the same as a qsf_io_method */
    uint32_t io_depth;     /* reads under way at the same time */
    uint32_t io_is_probed; /* 1: a probe chose it; pass it as io_known_method next time */
    uint32_t n_layers;
    uint32_t dim;
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t ffn_dim;
    uint32_t n_vocab;
    uint32_t max_tokens; /* the longest sequence that the model was trained for */
    uint32_t bos_id;     /* or QSF_TOKEN_NONE; the same for the next two */
    uint32_t eos_id;
    uint32_t pad_id;
    uint64_t n_parameters;
    uint64_t file_bytes;
    qsf_plan plan; /* the plan that this model was opened with */
} qsf_model_facts;

/* Fills *out. If m is NULL, *out does not change. */
QSF_API void qsf_model_info(const qsf_model *m, qsf_model_facts *out);

/* Returns the size of the section `tag` ("META", "TOKN", "CHAT") as it is stored, 0 if the file has
 * none. TOKN may be compressed: docs/format.md, section 2. */
QSF_API uint64_t qsf_model_section_bytes(const qsf_model *m, const char *tag);

/* Reads a section into dst [cap_bytes] and verifies its checksum. QSF_ERR_ARG if the file has no
 * such section or cap_bytes is too small. */
QSF_API qsf_status qsf_model_section(qsf_model *m, const char *tag, void *dst, uint64_t cap_bytes);

/* Reads the whole file and verifies every checksum and every padding byte. It needs 1 MB of
 * memory. */
QSF_API qsf_status qsf_file_verify(const char *path);

/* ---- session ---- */

/* Creates a session without tokens. QSF_ERR_NOMEM if max_sessions are open already. */
QSF_API qsf_status qsf_session_create(qsf_model *m, qsf_session **out);
QSF_API void qsf_session_destroy(qsf_session *s);

/* Brings the session one step closer to holding exactly tokens [n_tokens], n_tokens >= 1: drops
 * the tokens after the common prefix, then evaluates at most one chunk of the missing ones.
 * *n_done becomes the number of tokens that are evaluated. Call again until it equals n_tokens.
 * The last token is always evaluated again, so that its logits are available.
 * QSF_ERR_ARG: a token is outside the vocabulary, or n_tokens > ctx_tokens.
 * After QSF_ERR_CANCELLED, QSF_ERR_IO or QSF_ERR_FORMAT the session holds the tokens that it held
 * before the chunk and can be used again. */
QSF_API qsf_status qsf_session_sync(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                                    size_t *n_done);

/* Does what sync does, and writes the logits of each token that it evaluates to
 * logits [n_tokens - first_row, n_vocab]: row i belongs to tokens[first_row + i]. Tokens before
 * first_row get no logits and are evaluated only if the session does not hold them. Set *n_done
 * to 0 before the first call, then call again until it equals n_tokens. */
QSF_API qsf_status qsf_session_score(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                                     size_t first_row, float *logits, size_t cap_floats,
                                     size_t *n_done);

/* Evaluates one token and appends it to the session. Allocates no memory. */
QSF_API qsf_status qsf_session_step(qsf_session *s, uint32_t token);

/* Returns the number of tokens that the session holds. */
QSF_API size_t qsf_session_position(const qsf_session *s);

/* Drops all tokens after the first n_tokens. There are no logits until the next step or sync.
 * QSF_ERR_ARG, also if a layer with a window no longer holds what token n_tokens would see: such a
 * layer keeps its window, and a chunk. qsf_session_sync then evaluates from the start. */
QSF_API qsf_status qsf_session_rewind(qsf_session *s, size_t n_tokens);

/* Makes the running sync, score or step of this session return QSF_ERR_CANCELLED before its next
 * layer. If none is running, the next call returns it. Other threads and signal handlers may call
 * this function at any time. */
QSF_API void qsf_session_cancel(qsf_session *s);

/* ---- results ---- */

/* Copies the logits of the last token to out [n_vocab]. QSF_ERR_ARG if there are no logits
 * (nothing was evaluated, or the session was rewound) or cap_floats < n_vocab. */
QSF_API qsf_status qsf_session_logits(const qsf_session *s, float *out, size_t cap_floats);

/* How to choose a token. The engine applies the fields in this order. */
typedef struct qsf_sampling {
    float repetition_penalty; /* > 0; 1: off. Divides positive logits, multiplies negative ones */
    float temperature;        /* >= 0; 0: the largest logit, of equal ones the lowest id */
    uint32_t top_k;           /* 0: off */
    float top_p;              /* (0, 1]; 1: off */
    float min_p;              /* [0, 1]; 0: off. Relative to the most probable token */
} qsf_sampling;

/* Sets temperature 0.7, top_k 40, top_p 0.9 and turns the rest off. */
QSF_API void qsf_sampling_default(qsf_sampling *out);

/* Chooses the next token from the session's logits, which do not change.
 * recent [n_recent] are the tokens that the repetition penalty applies to. *random_state is the
 * state of the random generator; a call draws once unless temperature is 0. The same logits,
 * parameters and state give the same token on every machine.
 * QSF_ERR_NUMERIC: a logit is NaN or infinite. */
QSF_API qsf_status qsf_session_sample(qsf_session *s, const qsf_sampling *how,
                                      const uint32_t *recent, size_t n_recent,
                                      uint64_t *random_state, uint32_t *token);

/* Parts of a call of sync, score or step. Each nanosecond of the calling thread belongs to exactly
 * one of them. */
typedef enum qsf_phase {
    QSF_PHASE_EMBEDDING = 0, /* embedding rows, positions, RoPE tables */
    QSF_PHASE_NORM = 1,      /* norms, and rounding their results to integers */
    QSF_PHASE_QKV = 2,       /* Q, K, V, bias, RoPE and the KV store. This and the other products
                              * include sparse outliers and waiting for the slowest thread */
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
    uint64_t kv_used_bytes;   /* bytes in use by this session's KV pages */
    /* of the model since open: loops over rows or tokens, how many of them ran on several threads,
     * and the time in those, with waiting for the slowest thread */
    uint64_t n_loops;
    uint64_t n_parallel_regions;
    uint64_t parallel_ns;
    /* rows of an embedding table that is not resident: requested, and found in the cache */
    uint64_t n_embedding_rows;
    uint64_t n_embedding_hits;
    /* under memory pressure: how often and how many bytes were given back, and taken again */
    uint64_t n_given_back;
    uint64_t n_taken_again;
    uint64_t given_back_bytes;
    uint64_t taken_again_bytes;
    /* prompt_ns and step_ns of this session, split by qsf_phase. Calls that failed count in
     * neither */
    uint64_t phase_ns[QSF_N_PHASES];
    uint64_t sample_ns; /* time in qsf_session_sample */
    uint64_t n_samples; /* tokens that qsf_session_sample chose */
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
    uint64_t compute_ns; /* the rest of the time from the unit's beginning to its end */
    uint32_t is_resident;
    uint32_t is_skipped; /* 1: the layer is skipped, and the other fields are 0 */
} qsf_unit_time;

/* Fills out [cap_units], one entry for each unit of the file: embedding, layers (skipped ones
 * too), final norm and head. Returns the number of units. */
QSF_API size_t qsf_model_timeline(qsf_model *m, qsf_unit_time *out, size_t cap_units);

/* Memory that was given back to the system under pressure, or taken again. */
typedef struct qsf_memory_event {
    uint64_t seconds;          /* since open */
    uint64_t bytes;            /* bytes given back or taken again */
    uint64_t available_bytes;  /* memory that the system had available before */
    uint32_t is_given_back;    /* 0: taken again */
    uint32_t n_units_resident; /* resident units after the event */
} qsf_memory_event;

/* Fills out [cap_events] with the latest events, oldest first. Returns the number of events. */
QSF_API size_t qsf_model_memory_events(qsf_model *m, qsf_memory_event *out, size_t cap_events);

/* ---- tracing ---- */

/* The kind of an event is a qsf_phase or one of these values. */
typedef enum qsf_trace_kind {
    QSF_TRACE_PASS = 11,     /* a whole forward pass, from the start of this session's turn */
    QSF_TRACE_READ = 12,     /* one read; a reading thread may have several in flight */
    QSF_TRACE_CHECKSUM = 13, /* verifying the bytes that were read */
    QSF_TRACE_SAMPLE = 14    /* choosing a token */
} qsf_trace_kind;

/* Returns the name of a kind, such as "qkv" or "read", or "unknown": a static string, never
 * NULL. */
QSF_API const char *qsf_trace_kind_name(uint32_t kind);

/* Times are of the clock CLOCK_MONOTONIC. */
typedef struct qsf_trace_event {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t n_bytes;    /* bytes read, verified, waited for or decompressed; else 0 */
    uint32_t kind;       /* a qsf_phase or a qsf_trace_kind */
    uint32_t unit_idx;   /* as in qsf_model_timeline(), or QSF_UNIT_NONE */
    uint32_t thread_idx; /* 0: the calling thread; from 1 on: reading threads */
    uint32_t n_tokens;   /* tokens in the chunk; 0 for reading threads */
} qsf_trace_event;

/* Starts a trace: the engine writes the events of the model and its sessions to
 * events [cap_events], in the order in which each thread ends them. When the array is full,
 * further events are dropped. An event of waiting or decompressing lies inside an event of another
 * phase. Events of phases lie inside a pass, except QSF_PHASE_OTHER before and after it. Waits
 * of less than one microsecond are left out.
 * The engine uses the array until the next call of this function or until qsf_model_close(); after
 * that no thread touches it. The next call starts a new trace, or ends tracing if events is NULL.
 * QSF_ERR_ARG: cap_events is 0. */
QSF_API qsf_status qsf_model_trace(qsf_model *m, qsf_trace_event *events, size_t cap_events);

/* Returns the number of events written by the current trace, or by the last one if tracing has
 * ended. *n_dropped, unless n_dropped is NULL, becomes the number of dropped events. */
QSF_API size_t qsf_model_trace_count(qsf_model *m, uint64_t *n_dropped);

/* ---- text ---- */

/* The vocabulary of a file: text to token ids and back. It never changes once it is open, so any
 * number of threads may use it at the same time, with or without a model. The plan of a model that
 * is opened afterwards counts its tables as memory of the process. */
typedef struct qsf_text qsf_text;

/* Reads and checks the section TEXT of the file `path` (UTF-8). QSF_ERR_UNSUPPORTED if the file has
 * none: the engine does not cover its kind of tokenizer, or an older converter wrote the file.
 * After an error *out is NULL and nothing is held. */
QSF_API qsf_status qsf_text_open(const char *path, qsf_text **out);

/* Does the same with the bytes of the section, which it copies. */
QSF_API qsf_status qsf_text_create(const void *section, uint64_t n_bytes, qsf_text **out);
QSF_API void qsf_text_close(qsf_text *t);

typedef struct qsf_text_facts {
    char model[16];      /* "byte-level BPE", "BPE" or "unigram" */
    uint32_t n_tokens;   /* tokens, added ones included */
    uint32_t n_ids;      /* one more than the largest id */
    uint64_t n_bytes;    /* memory that the vocabulary takes */
    uint64_t room_bytes; /* cap_bytes of qsf_decoder_push that is enough for every token */
} qsf_text_facts;

/* Fills *out. If t is NULL, *out does not change. */
QSF_API void qsf_text_info(const qsf_text *t, qsf_text_facts *out);

/* Flags of qsf_tokenize. PREFIX: begin with the tokens that begin a text (BOS), unless the text
 * begins with them. SPECIAL: text that reads like a special token becomes that token; leave it out
 * for text from a user, which is then ordinary text. */
#define QSF_TOKENIZE_PREFIX 1
#define QSF_TOKENIZE_SPECIAL 2

/* Converts text [n_bytes] to token ids, without an end token. It writes at most cap_ids of them to
 * ids. *n_ids becomes their number; if that is more than cap_ids, call again with as many. A token
 * has at least one byte of text, except for the prefix and what normalisation adds.
 * QSF_ERR_ARG: the text is not UTF-8. QSF_ERR_NOMEM: the call would need more than 64 MB of memory;
 * docs/memory.md says how much a text needs. */
QSF_API qsf_status qsf_tokenize(const qsf_text *t, const char *text, size_t n_bytes, uint32_t flags,
                                uint32_t *ids, size_t cap_ids, size_t *n_ids);

/* Flags of qsf_detokenize. SPECIAL: special tokens have text too. START: the ids begin a text, so
 * the space that a SentencePiece vocabulary puts there is dropped. */
#define QSF_DETOKENIZE_SPECIAL 1
#define QSF_DETOKENIZE_START 2

/* Converts ids [n_ids] to text: valid UTF-8 without a terminating zero. Bytes that no continuation
 * can complete to a character become U+FFFD. Ids that do not exist have no text. *n_bytes becomes
 * the size of the text. out [cap_bytes] is filled only if cap_bytes is large enough. */
QSF_API qsf_status qsf_detokenize(const qsf_text *t, const uint32_t *ids, size_t n_ids,
                                  uint32_t flags, char *out, size_t cap_bytes, size_t *n_bytes);

/* The state of a text that arrives token by token. A copy of the struct is a copy of the state. */
typedef struct qsf_text_decoder {
    uint32_t skips_special;
    uint32_t is_at_start;
    uint32_t n_leading;
    uint32_t n_pending;
    unsigned char pending[4];
} qsf_text_decoder;

/* Begins a text. The flags are those of qsf_detokenize. */
QSF_API void qsf_decoder_init(const qsf_text *t, uint32_t flags, qsf_text_decoder *out);

/* Adds one token and writes the characters that it completes, often none, to out [cap_bytes].
 * room_bytes of qsf_text_facts is enough for every token. QSF_ERR_ARG if cap_bytes is too small for
 * this token; the decoder does not change then. */
QSF_API qsf_status qsf_decoder_push(const qsf_text *t, qsf_text_decoder *d, uint32_t id, char *out,
                                    size_t cap_bytes, size_t *n_bytes);

/* Ends a text: writes U+FFFD to out [3] if a character is unfinished. Returns the number of bytes
 * written. */
QSF_API size_t qsf_decoder_flush(qsf_text_decoder *d, char *out);

/* Writes the bytes of one token, which need not be UTF-8, to out [cap_bytes]: _text as they stand
 * in a text, _name as the vocabulary names the token. Returns their number, which may be more than
 * cap_bytes; 0 if the id does not exist. */
QSF_API size_t qsf_token_text(const qsf_text *t, uint32_t id, char *out, size_t cap_bytes);
QSF_API size_t qsf_token_name(const qsf_text *t, uint32_t id, char *out, size_t cap_bytes);

/* Returns the token with this name, or QSF_TOKEN_NONE. If a token of the model and an added token
 * have the same name, is_added chooses: 1 the added one, 0 the other. */
QSF_API uint32_t qsf_token_find(const qsf_text *t, const char *name, size_t n_bytes,
                                uint32_t is_added);

/* Fills ids [cap_ids] with the special tokens in ascending order. Returns their number. */
QSF_API size_t qsf_text_special(const qsf_text *t, uint32_t *ids, size_t cap_ids);

/* ---- for converters: rounding matrices to tiles ---- */

#define QSF_RULE_SEARCH 0  /* search for the scales and mins with the least squared error */
#define QSF_RULE_NEAREST 1 /* scales from the range, or from the largest magnitude */
#define QSF_RULE_SCALE 2   /* ternary types: the same given scale for all blocks */

/* How a matrix is rounded (docs/format.md, section 5). */
typedef struct qsf_rounding {
    uint32_t dtype;       /* id of a tensor type */
    uint32_t rule;        /* QSF_RULE_*; ignored for f16 and f32 */
    float scale;          /* for QSF_RULE_SCALE: 0 .. 65504, rounded to f16 */
    const float *weights; /* [n_cols]: weight of a column's squared error, finite and >= 0. NULL:
                           * equal weights. A block whose weights are all 0 has equal weights */
} qsf_rounding;

/* Sums over all values, to judge the rounding. */
typedef struct qsf_rounding_sums {
    uint64_t n_values;
    uint64_t bad_row; /* after QSF_ERR_NUMERIC: first row of the tile that has NaN or infinity */
    double squared_error; /* (source - stored)^2 */
    double source_energy; /* source^2 */
    double stored_energy; /* stored^2 */
    double inner_product; /* source * stored */
    double max_error;     /* largest |source - stored| */
} qsf_rounding_sums;

/* Rounds rows [n_rows, n_cols] and writes them as tiles. cap_bytes is at least
 * ceil(n_rows / 16) * ceil(n_cols / 64) * bytes of a tile. stored [n_rows, n_cols], unless NULL,
 * receives the rounded values. The bits depend neither on the instruction set nor on how the
 * matrix is split into calls, if each call but the last has a multiple of 16 rows. Any number of
 * threads may call at the same time.
 * QSF_ERR_NUMERIC: a value is NaN, infinite, or too large for a scale or min of the type. */
QSF_API qsf_status qsf_quantise_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                                     size_t n_cols, void *tiles, size_t cap_bytes, float *stored,
                                     qsf_rounding_sums *sums);

/* Returns the number of floats that qsf_feedback_rows() needs as `work`; 0 if n_cols is more than
 * a matrix may have. */
QSF_API size_t qsf_feedback_work_floats(size_t n_cols);

/* Rounds like qsf_quantise_rows(), but one column after another: later columns compensate for the
 * error of earlier ones (GPTQ, Frantar et al. 2022). order [n_cols] is a permutation of the columns
 * that keeps the columns of each block of 64 together. factor [n_cols, n_cols], in that order, is
 * the upper triangular U with U^T U = the inverse of the damped second moments of the inputs; the
 * part below the diagonal is not read. work [cap_floats] is scratch memory. The sums compare with
 * `rows`.
 * QSF_ERR_ARG: order repeats or omits an index or splits a block, a diagonal element is not above
 * 0, or the type is not quantised.
 * QSF_ERR_NUMERIC: as for qsf_quantise_rows(), or the values grew too large: use more damping. */
QSF_API qsf_status qsf_feedback_rows(const qsf_rounding *how, const float *rows, size_t n_rows,
                                     size_t n_cols, const float *factor, const int32_t *order,
                                     float *work, size_t cap_floats, void *tiles, size_t cap_bytes,
                                     float *stored, qsf_rounding_sums *sums);

/* ---- cdef end ---- */

#ifdef __cplusplus
}
#endif

#endif
