/* qsf_model.h - part of qsf.h: a model, its options, its memory plan, its file. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_H
#define QSF_MODEL_H

#include "qsf_library.h"

QSF_C_BEGIN

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

/* budget_bytes, the default: half of the memory that is free without this process, at least 200
 * MiB, of which a plan takes what the model and its context need */
#define QSF_BUDGET_AUTO 0xFFFFFFFFFFFFFFFF
#define QSF_DEFAULT_CTX_TOKENS 16384
#define QSF_TOKEN_NONE 0xFFFFFFFF /* "no such token" in qsf_model_info */
#define QSF_MAX_DRAFT_ROWS 127
#define QSF_MAX_ADAPTERS 16
#define QSF_SKIP_WORDS 64 /* words of 64 bits; one bit for each layer that a file may have */

/* Type of the numbers in the KV cache. Types of 2, 4 and 8 bits have a scale for 64 numbers. */
typedef enum qsf_kv_type {
    QSF_KV_DEFAULT = 0, /* the file's default, else 8 bits; f32 if exact is 1 */
    QSF_KV_2BIT = 2,
    QSF_KV_4BIT = 4,
    QSF_KV_8BIT = 8,
    QSF_KV_F16 = 16,
    QSF_KV_F32 = 32
} qsf_kv_type;

/* Rotating keys and values by a Hadamard matrix spreads outliers over the head; types of few bits
 * then lose less. Heads of 16, 32, .. 4096 dimensions can be rotated. */
typedef enum qsf_kv_rotation {
    QSF_KV_ROTATION_AUTO = 0, /* on for 8 bits or fewer and heads of 16 to 256 dimensions */
    QSF_KV_ROTATION_OFF = 1,
    QSF_KV_ROTATION_ON = 2 /* QSF_ERR_ARG if the heads cannot be rotated */
} qsf_kv_rotation;

/* How weights are read from the file. */
typedef enum qsf_io_method {
    QSF_IO_AUTO = 0,     /* buffered if the page cache holds the file or has room for it; else
                          * direct, or buffered if the system refuses that */
    QSF_IO_BUFFERED = 1, /* pread through the page cache */
    QSF_IO_DIRECT = 2,   /* pread past the page cache */
    QSF_IO_URING = 3,    /* io_uring past the page cache */
    QSF_IO_MMAP = 4      /* copied from a mapping of the file */
} qsf_io_method;

/* An adapter of low rank (LoRA) that `qsf convert --lora ADAPTER --for FILE` made for the file. */
typedef struct qsf_adapter_choice {
    const char *path; /* UTF-8 */
    float scale;      /* finite: 1 is the adapter as it was trained, 0 changes nothing */
} qsf_adapter_choice;

/* How to open a model. Fill it with qsf_options_default() before you set fields. */
typedef struct qsf_options {
    uint64_t budget_bytes;  /* most memory of the whole process; 0: all that the machine has
                             * left; default: QSF_BUDGET_AUTO */
    uint64_t reserve_bytes; /* part of the budget that the caller will use itself, at least ... */
    uint32_t reserve_token_bytes; /* ... so much for each token of the context, of which
                                   * QSF_DEFAULT_CTX_TOKENS count at most */
    uint32_t n_threads;           /* 0: one per physical core */
    uint32_t ctx_tokens;          /* longest sequence of a session; 0: the model's, at most
                                   * QSF_DEFAULT_CTX_TOKENS, less if the budget is small */
    uint32_t chunk_tokens;        /* most prompt tokens evaluated together; 0: the plan chooses */
    uint32_t max_sessions; /* sessions that may be open at once; the plan includes their caches */
    uint32_t kv_contexts;  /* sequences of ctx_tokens that the KV pool of all sessions has room
                            * for, at most max_sessions; 0: as many as sessions */
    uint32_t logits_rows;  /* most tokens with logits in a qsf_model_pass(), at most 4096; 0: as
                            * many as sessions */
    uint32_t draft_rows;   /* most drafts that a qsf_session_step() evaluates after its token, 0 to
                              QSF_MAX_DRAFT_ROWS; 0: none. Fewer if the budget is small or most
                              experts are not in memory */
    /* UTF-8 path of a smaller model that guesses tokens (draft model), or NULL. It is held in
     * memory, inside the plan, if that saves more time than the same memory for the model's own
     * weights; else drafter_state of the plan says why not. QSF_ERR_ARG if its vocabulary differs,
     * it reads keys and values that this model has not, or draft_rows is 0. Only open and plan read
     * it */
    const char *draft_path;
    uint32_t pin_threads; /* 1: each thread that the engine starts stays on a physical core of
                           * its own (Linux); QSF_ERR_ARG if there are too few cores. The
                           * calling thread is never pinned */
    uint32_t exact;       /* 1: f32 activations, f32 KV cache, plain kernels: slow, for reference */
    uint32_t kv_k_type;   /* qsf_kv_type of the keys; if exact is 1, only QSF_KV_F32 */
    uint32_t kv_v_type;   /* qsf_kv_type of the values */
    uint32_t kv_rotation; /* a qsf_kv_rotation */
    /* Layers without a window of their own attend to the newest kv_window_tokens, at least 32, and
     * to the first kv_pinned_tokens only, and keep no others: less memory, but different answers.
     * 0: off. QSF_ERR_ARG if all layers have windows */
    uint32_t kv_window_tokens;
    uint32_t kv_pinned_tokens;
    /* UTF-8 path of a folder on a disk, or NULL. With a folder a context may exceed memory: the
     * newest kv_resident_tokens (0: the plan chooses) and a chunk stay in memory, and older keys
     * and values lie in an unnamed file of each session, which every pass reads: the same bits,
     * slower. Not with kv_window_tokens or kv_contexts. A full disk causes QSF_ERR_IO and leaves
     * sessions unchanged */
    const char *kv_folder;
    uint32_t kv_resident_tokens;
    uint32_t ctx_is_fixed; /* 1: a small budget does not shorten the context if ctx_tokens is 0 */
    uint32_t io_method;    /* a qsf_io_method; QSF_ERR_UNSUPPORTED if the system lacks it */
    uint32_t io_depth;     /* reads in flight, at most 32; 0: up to 8, as many as are fastest */
    /* Share of the layers that run, 0 to 1. (1 - quality) * n_layers, rounded to nearest, are
     * skipped, the least important first, but never the first two or the last two. Skipped
     * layers are not read and have no KV cache. QSF_ERR_ARG if the file does not say how
     * important its layers are, or has four layers or fewer. */
    double quality;
    /* [n_adapters], at most QSF_MAX_ADAPTERS: they change sessions by these scales, until
     * qsf_session_set_adapters() sets others. Only open and plan read them. They stay in memory,
     * inside the plan. QSF_ERR_ARG: one is of another file */
    const qsf_adapter_choice *adapters;
    uint32_t n_adapters;
    /* A stage of a model that lies on several machines: only the n_layers layers from first_layer
     * on (0: all that follow). If first_layer is not 0, the rows of the layers before come from
     * qsf_model_set_source(). A stage without the last layer has no head: its passes give the
     * residual (qsf_pass_item.residual), never logits. QSF_ERR_ARG: the model cannot be cut there
     */
    uint32_t first_layer;
    uint32_t n_layers;
} qsf_options;

QSF_API void qsf_options_default(qsf_options *out);

/* The outcome of qsf_options.draft_path. */
typedef enum qsf_drafter_state {
    QSF_DRAFTER_NONE = 0, /* it was NULL */
    QSF_DRAFTER_HELD = 1,
    QSF_DRAFTER_NO_ROOM = 2,   /* it does not fit beside the model, its context and its drafts */
    QSF_DRAFTER_NOT_WORTH = 3, /* a pass would read more than 2.25 times as much from the file */
    QSF_DRAFTER_COLD = 4 /* it reads the model's keys and values, of which some are in a file */
} qsf_drafter_state;

/* The memory plan, made before any memory is taken. engine_bytes is the sum of the fields from
 * weights_bytes to stacks_bytes, without ring_bytes, which is part of stream_bytes. */
typedef struct qsf_plan {
    uint64_t budget_bytes;    /* from the options, or chosen for QSF_BUDGET_AUTO; 0: none */
    uint64_t ceiling_bytes;   /* the plan stays below this: the budget, or less if the machine or
                               * its control group has less left; 0: no ceiling */
    uint64_t process_bytes;   /* resident before the model was opened */
    uint64_t reserve_bytes;   /* the caller's own share, from the options */
    uint64_t engine_bytes;    /* all memory that the engine will allocate */
    uint64_t weights_bytes;   /* resident units; part of model_bytes */
    uint64_t stream_bytes;    /* buffers for units that are not resident */
    uint64_t ring_bytes;      /* part of stream_bytes: the buffer for reading ahead */
    uint64_t embedding_bytes; /* one band and the cache of rows, if the embedding table is not
                               * resident */
    uint64_t experts_bytes;   /* slots of experts, if the model has any */
    uint64_t kv_bytes;        /* KV pages and states of all sessions, their tokens and logits */
    uint64_t kv_pool_bytes;   /* part of kv_bytes: the pages and states */
    uint64_t state_bytes;     /* part of kv_pool_bytes: recurrent states and their snapshots; 0: no
                                 layer is recurrent */
    uint64_t kv_cold_token_bytes; /* bytes of keys and values that a token at the end of the context
                                     reads from a file; 0: all are in memory */
    uint64_t
        session_bytes; /* one session without its pages; kv_bytes includes it for each session */
    uint64_t scratch_bytes;    /* activations of one prompt chunk, logits of a pass and of drafts,
                                * sampling */
    uint64_t drafter_bytes;    /* the draft model with its own KV cache and buffers, or 0 */
    uint64_t adapters_bytes;   /* adapters of low rank */
    uint64_t tables_bytes;     /* index, positions, session and thread records */
    uint64_t stacks_bytes;     /* of the worker threads */
    uint64_t model_bytes;      /* raw bytes of all n_units and all experts */
    uint64_t streamed_bytes;   /* bytes read from the file for every token, without experts */
    uint64_t min_budget_bytes; /* the smallest budget_bytes that works with these options */
    uint32_t n_units;          /* embedding, layers that are not skipped, final norm and head */
    uint32_t n_units_resident;
    uint32_t ctx_tokens;
    uint32_t kv_resident_tokens; /* tokens of the context whose keys and values stay in memory */
    uint32_t chunk_tokens;
    uint32_t n_threads;
    uint32_t max_sessions;
    uint32_t kv_contexts;          /* sequences of ctx_tokens that the KV pool has room for */
    uint32_t logits_rows;          /* 0: a pass gives logits to one item */
    uint32_t draft_rows;           /* 0: steps evaluate no drafts */
    uint32_t drafter_state;        /* a qsf_drafter_state */
    uint32_t mtp_state;            /* the same of the file's MTP head, unless a draft model or no
                                    * drafts are asked for */
    uint64_t drafter_wanted_bytes; /* drafter_bytes if the draft model were held */
    uint32_t kv_k_bits;            /* bits of a key in the KV cache; 16 and 32 are floats */
    uint32_t kv_v_bits;
    uint32_t kv_is_rotated;  /* 0 or 1 */
    uint32_t io_depth;       /* most reads in flight at a time; 0: nothing is streamed */
    uint32_t embedding_rows; /* rows in the embedding cache; 0: no cache */
    /* Mixtures of experts: a token's experts are read unless a slot holds them. */
    uint32_t n_experts;            /* of all layers; 0: the model has none */
    uint32_t experts_a_token;      /* experts that a token uses, in all layers */
    uint32_t expert_slots;         /* experts that can stay in memory */
    uint32_t expert_transit_slots; /* additional slots for experts that do not stay in memory */
    uint64_t expert_slot_bytes;    /* of the largest expert */
    uint64_t expert_token_bytes;   /* bytes of the experts of a token, all of them read if no slot
                                      holds them */
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
    uint32_t io_depth;     /* most reads under way at the same time */
    uint32_t n_layers;
    uint32_t dim;
    uint32_t vector_dim; /* of hidden states: dim, unless an encoder multiplies them */
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t ffn_dim;
    uint32_t n_vocab;
    uint32_t max_tokens;  /* the longest sequence that the model was trained for */
    uint32_t is_windowed; /* 1: layers have windows, so a sequence is cut near its end only */
    uint32_t bos_id;      /* or QSF_TOKEN_NONE; the same for the next two */
    uint32_t eos_id;
    uint32_t pad_id;
    uint64_t n_parameters;
    uint64_t file_bytes;
    qsf_plan plan; /* the plan that this model was opened with */
} qsf_model_facts;

/* Fills *out. If m is NULL, *out does not change. */
QSF_API void qsf_model_info(qsf_model *m, qsf_model_facts *out);

/* Returns the size of the section `tag` ("META", "TOKN", "CHAT") as it is stored, 0 if the file has
 * none. TOKN may be compressed: docs/format.md, section 2. */
QSF_API uint64_t qsf_model_section_bytes(const qsf_model *m, const char *tag);

/* Reads a section into dst [cap_bytes] and verifies its checksum. QSF_ERR_ARG if the file has no
 * such section or cap_bytes is too small. */
QSF_API qsf_status qsf_model_section(qsf_model *m, const char *tag, void *dst, uint64_t cap_bytes);

/* Reads the whole file and verifies every checksum and every padding byte. It needs 1 MB of
 * memory. */
QSF_API qsf_status qsf_file_verify(const char *path);

/* ---- cdef end ---- */

QSF_C_END

#endif
