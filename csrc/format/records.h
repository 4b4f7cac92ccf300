/* records.h - the numbers and names of an open file, and how to find one of them.
 *
 * qsf_reader_open fills the records and checks every number in them against
 * docs/format.md; they are read-only afterwards.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/layout.h"
#include "include/qsf.h"
#include "memory/ledger.h"
#include "platform/file.h"

/* ---- cdef begin ---- (cffi reads this part too: stream/contents.h) */

typedef struct qsf_header {
    uint32_t architecture;
    uint32_t n_layers;
    uint32_t dim;
    uint32_t n_heads;
    uint32_t n_kv_heads; /* never 0: resolved */
    uint32_t n_vocab;
    uint32_t max_tokens;
    uint32_t ffn_dim;
    uint32_t head_dim;
    uint8_t dtype;
    uint8_t activation;
    uint8_t norm;
    uint8_t positions;
    float rope_theta;
    uint32_t bos_id; /* QSF_TOKEN_NONE: none */
    uint32_t eos_id;
    uint32_t pad_id;
} qsf_header;

/* f32 values of a section, in the machine's byte order */
typedef struct qsf_floats {
    const float *values; /* [n] */
    uint32_t n;
} qsf_floats;

/* A section that stays in memory for its floats */
typedef struct qsf_table {
    unsigned char *bytes; /* NULL: the file does not have it */
    size_t n_bytes;
} qsf_table;

/* The ARCH section, defaults filled in. */
typedef struct qsf_arch {
    float norm_epsilon;
    uint32_t rope_scaling; /* qsf_rope_scaling */
    float rope_factor;
    float rope_low_freq_factor;
    float rope_high_freq_factor;
    uint32_t rope_original_tokens;
    uint32_t rope_dims;
    uint32_t rope_interleaved; /* 0 or 1 */
    uint32_t tied_head;        /* 0 or 1 */
    uint32_t window_tokens;    /* 0: none */
    float embedding_factor;
    float logit_cap;       /* 0: none */
    uint32_t is_encoder;   /* 0 or 1: no head, and a token sees later ones too */
    uint32_t target_dim;   /* of the model that this one guesses for, whose keys and values it
                              reads, and its hidden state; 0: it is no such drafter */
    uint32_t own_width;    /* of the embeddings that each layer has of its own; 0: none */
    uint32_t block_layers; /* layers of a residual block; 0: there is one residual */
    uint32_t loop_begin;   /* the first looped layer */
    uint32_t loop_end;     /* one more than the last one; 0: none */
    uint32_t loop_passes;  /* over the looped layers */
    uint32_t kv_key_bits;  /* default bits of keys, 2, 4, 8, 16 or 32; 0: none; likewise the next */
    uint32_t kv_value_bits;
    uint32_t act_bits; /* of activations with weights of codes below 8 bits: 8 or 16 */
} qsf_arch;

/* The computation of a layer: docs/format.md, section 7. Defaults are filled in. */
typedef struct qsf_layer_kind {
    uint32_t mixer;  /* qsf_mixer_kind; the next fields, up to query_rank, are of attention */
    uint32_t is_mtp; /* 0 or 1: the MTP head, which is the last layer and guesses the next token but
                        one; its input is made of a token's embedding and the hidden state before */
    uint32_t is_parallel;  /* 0 or 1 */
    uint32_t is_post_norm; /* 0 or 1: the FFN's norm is one of the residual itself */
    uint32_t is_encoder;   /* as in qsf_arch; never stored in a kind */
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window_tokens; /* 0: attends to all earlier positions */
    uint32_t pinned_tokens; /* first positions that are seen in addition to the window; never stored
                               in a file */
    uint32_t rope_set;      /* a number of qsf_rope_set, or QSF_ROPE_NONE */
    float score_scale;
    float score_cap;           /* 0: none */
    float temperature_beta;    /* 0: none */
    uint32_t temperature_step; /* 0: none */
    qsf_floats alibi_slopes;   /* [n_heads], or none */
    uint32_t qk_norm;          /* qsf_qk_norm */
    uint32_t has_late_qk_norm; /* 0 or 1: that norm is behind RoPE */
    float qkv_limit;           /* q, k and v are clamped to -limit .. limit; 0: none */
    uint32_t kv_source;        /* 1 + the layer whose keys and values it reads; 0: its own; or
                                  QSF_KV_LENT: it sees positions before the token's, and w - 1 of
                                  them through a window of w */
    uint32_t relative_dim;     /* of the relative mixer, likewise the next five */
    uint32_t relative_extent;  /* tokens; biases of longer distances are 0 */
    float length_limit;        /* of a query or key head; likewise the next */
    float relative_limit;
    uint32_t has_own_inputs;   /* 0 or 1: of queries, keys and values; and taps of each token */
    uint32_t message_rank;     /* of a looped layer's message gates; 0: none */
    uint32_t output_gate;      /* qsf_output_gate */
    uint32_t value_norm;       /* 0 or 1: each head of the values is normalised, without weights */
    uint32_t values_are_keys;  /* 0 or 1: values are the keys before their norm and RoPE */
    uint32_t latent_rank;      /* of latent attention; else 0; likewise the next two */
    uint32_t nope_dim;         /* of a query without its part for RoPE, before K_UP */
    uint32_t latent_value_dim; /* of a head after V_UP */
    uint32_t latent_norm_dim;  /* of the latent's first numbers; the others are 0; 0: all */
    uint32_t query_rank;       /* of latent attention; 0: queries come from one matrix */
    uint32_t n_taps;           /* of a convolution; else 0 */
    uint32_t n_key_heads;      /* of the delta rule, or groups of SSD; 0 without, as the next 3 */
    uint32_t n_value_heads;    /* a multiple of the key heads */
    uint32_t key_dim;
    uint32_t value_dim;
    uint32_t gate_rank;          /* this and the next 5: of the delta rule; 0: one matrix each */
    uint32_t has_channel_decays; /* 0 or 1: a decay for each channel of a value head's keys */
    uint32_t has_sigmoid_gate;   /* 0 or 1: the gate's function is no silu */
    float beta_factor;
    float decay_limit;        /* decay = exp(-limit * sigmoid(rate * (a + bias))); 0: by softplus */
    float value_epsilon;      /* of the norm of a value; 0: the model's */
    uint32_t has_tiled_heads; /* 0 or 1: value heads of a key head are n_key_heads apart */
    uint32_t ffn;             /* qsf_ffn */
    uint32_t ffn_dim;
    uint32_t activation; /* qsf_activation */
    float xielu_square;  /* of that activation: the factors of squares, */
    float xielu_exp;     /* of e^x - 1 - x, */
    float xielu_line;    /* and of x */
    float gate_cap;      /* of the capped silu */
    float up_cap;
    float residual_factor;
    uint32_t n_experts; /* 0: no routed part */
    uint32_t n_chosen;  /* experts of a token */
    uint32_t expert_dim;
    uint32_t expert_ffn;     /* qsf_ffn: plain or gated */
    uint32_t expert_score;   /* qsf_expert_score */
    uint32_t expert_weights; /* qsf_expert_weights */
    float weights_epsilon;   /* added to the sum; 0: none */
    float weights_factor;
    uint32_t n_groups; /* 1: no grouping */
    uint32_t n_groups_kept;
    uint32_t group_score; /* qsf_group_score */
} qsf_layer_kind;

/* Frequencies of RoPE: docs/format.md, section 8. */
typedef struct qsf_rope_set {
    uint32_t number;
    uint32_t least_context; /* tokens */
    bool is_interleaved;
    float factor; /* of cos and sin */
    qsf_floats frequencies;
} qsf_rope_set;

typedef struct qsf_section {
    char tag[5]; /* NUL-terminated */
    uint64_t off;
    uint64_t n_bytes;
    uint32_t crc32;
    uint32_t flags; /* QSF_SECTION_REQUIRED */
} qsf_section;

typedef struct qsf_tensor {
    uint32_t unit_idx;
    uint32_t type; /* qsf_tensor_type */
    uint32_t n_rows;
    uint32_t n_cols;
    uint8_t dtype;
    uint8_t layout; /* qsf_layout */
    uint16_t index;
    uint32_t n_entries;  /* of sparse outliers, else 0 */
    uint64_t data_off;   /* in the unit's raw bytes */
    uint64_t data_bytes; /* without padding */
} qsf_tensor;

typedef struct qsf_unit {
    uint64_t off; /* in the file */
    uint64_t stored_bytes;
    uint64_t raw_bytes;
    uint32_t crc32;        /* of the stored bytes */
    uint8_t role;          /* qsf_unit_role */
    uint8_t compression;   /* qsf_compression */
    uint8_t dtype;         /* may be mixed */
    uint8_t kind;          /* of a layer: index in qsf_reader.kinds */
    uint16_t layer;        /* of a layer or an expert, as the file numbers layers; else 0 */
    uint16_t expert;       /* of an expert, within its layer; else 0 */
    uint32_t first_tensor; /* in qsf_reader.tensors */
    uint32_t n_tensors;
    float importance;
    uint32_t template_idx; /* the unit whose entries of the tensor table this one uses: itself, or
                              for an expert the first one with the same tensors */
    uint32_t first_expert; /* of a layer: the unit of its expert 0; its kind has their number */
} qsf_unit;

/* ---- cdef end ---- */

typedef struct qsf_reader {
    qsf_file file;
    qsf_header header;
    qsf_arch arch;
    uint32_t n_units;        /* of the file: those of a pass, the experts, the own table */
    uint32_t n_stream_units; /* the units before the experts */
    uint32_t n_experts;      /* of all layers */
    uint32_t embedding_unit;
    uint32_t final_unit;
    uint32_t own_table_unit; /* 0: there is none */
    uint32_t n_pass_units;   /* units that a pass runs, without experts: qsf_reader_leave_out */
    uint32_t n_pass_layers;
    uint32_t n_visits;    /* of these layers: looped ones count several times */
    bool has_mtp;         /* the last of them is an MTP head */
    bool is_without_head; /* a stage before others: a pass ends with its last layer */
    uint32_t
        n_storing_layers; /* layers of a pass up to the last one that stores something of a token */
    uint32_t n_tensors;
    uint32_t n_sections;
    uint32_t n_bands; /* of 16 rows of the embedding; likewise of the own table */
    uint32_t n_kinds;
    uint32_t n_rope_sets;        /* sets in the section ROPE; 0: header and ARCH describe RoPE */
    uint64_t directory_off;      /* in the file */
    qsf_unit *units;             /* [n_units], by role, layer and expert */
    uint32_t *pass_units;        /* [n_pass_units] embedding, layers, final: the order of a pass */
    const uint32_t *layer_units; /* [n_pass_layers] the layers in pass_units */
    qsf_tensor *tensors;         /* [n_tensors], sorted by unit and offset */
    qsf_section *sections;       /* [n_sections] */
    uint32_t *band_crc32;        /* [n_bands] of the embedding, then [n_bands] of the own table */
    qsf_layer_kind *kinds;       /* [n_kinds], at least one */
    qsf_rope_set *rope_sets;     /* [n_rope_sets], by number and least context */
    qsf_table kind_table;
    qsf_table rope_table;
    uint64_t tables_bytes; /* size of the arrays */
    qsf_ledger *ledger;    /* borrowed; outlives the reader */
} qsf_reader;

/* A section's tag for error texts: '?' replaces bytes that are not printable ASCII. */
void qsf_section_name(const char tag[4], char name[5]);

/* Convert an expert's place among the experts of all layers to its unit, and back. */
static inline uint32_t qsf_reader_expert_unit(const qsf_reader *r, uint32_t place)
{
    return r->n_stream_units + place;
}

static inline uint32_t qsf_reader_expert_place(const qsf_reader *r, uint32_t unit_idx)
{
    return unit_idx - r->n_stream_units;
}

/* The i-th layer that a pass runs, and what it computes. */
static inline const qsf_unit *qsf_reader_layer(const qsf_reader *r, uint32_t i)
{
    return &r->units[r->layer_units[i]];
}

static inline const qsf_layer_kind *qsf_reader_layer_kind(const qsf_reader *r, uint32_t i)
{
    return &r->kinds[qsf_reader_layer(r, i)->kind];
}

/* How often a pass runs a unit. */
static inline uint32_t qsf_reader_visits(const qsf_reader *r, const qsf_unit *u)
{
    const bool is_looped = (u->role == QSF_UNIT_LAYER || u->role == QSF_UNIT_EXPERT) &&
                           u->layer >= r->arch.loop_begin && u->layer < r->arch.loop_end;
    return is_looped ? r->arch.loop_passes : 1;
}

/* The layer of the pass that visit i runs: looped layers run one after another, then all again. */
static inline uint32_t qsf_reader_visited(const qsf_reader *r, uint32_t i)
{
    const uint32_t begin = r->arch.loop_begin;
    const uint32_t n = r->arch.loop_end - begin;
    if (r->arch.loop_end == 0 || i < begin)
        return i;
    return i < begin + n * r->arch.loop_passes ? begin + (i - begin) % n
                                               : i - n * (r->arch.loop_passes - 1);
}

/* The layers of the file without its MTP head. */
static inline uint32_t qsf_reader_trunk_layers(const qsf_reader *r)
{
    const qsf_unit *const last = &r->units[r->final_unit - 1]; /* units are in order of roles */
    return r->header.n_layers - (r->kinds[last->kind].is_mtp != 0 ? 1 : 0);
}

/* NULL when the file has no such section. `tag` has four bytes. */
const qsf_section *qsf_reader_section(const qsf_reader *r, const char *tag);

/* Reads a whole section into dst [n_bytes] and verifies its checksum. */
qsf_status qsf_reader_read_section(qsf_reader *r, const qsf_section *s, void *dst);

/* Reads a section into memory of the ledger, owned by the reader; *out is unchanged if the file
 * lacks the section. */
qsf_status qsf_reader_keep_section(qsf_reader *r, const char *tag, qsf_table *out);

/* The tensor of this type (index 0) in a unit; NULL when absent. Tensors of an expert are those of
 * its template. */
const qsf_tensor *qsf_reader_tensor(const qsf_reader *r, uint32_t unit_idx, uint32_t type);

/* ---- the reader ---- */

/* Reads the records, and no weights. On failure nothing is held and the reader is closed.
 * reads_until_fault: as in qsf_file; -1 outside of tests. Errors: QSF_ERR_IO, _FORMAT,
 * _UNSUPPORTED, _NOMEM. */
qsf_status qsf_reader_open(qsf_reader *r, qsf_ledger *ledger, const char *path,
                           int64_t reads_until_fault);
/* Accepts a reader that is zeroed, closed or half-open. */
void qsf_reader_close(qsf_reader *r);

/* Removes layers from the pass: pass_units and layer_units. The other records stay, and units keep
 * their numbers. is_left_out [n_layers of the header]: at least one layer must stay. */
void qsf_reader_leave_out(qsf_reader *r, const bool *is_left_out);

/* ---- the parts of a file (extents) in file order ---- */

typedef struct qsf_extent {
    uint64_t off;
    uint64_t n_bytes;
    uint32_t crc32;    /* unused for the header and the directory */
    bool is_checked;   /* crc32 must match */
    uint32_t unit_idx; /* UINT32_MAX: not a unit */
    char name[12];     /* "header", "directory", the tag of a section, or the role of a unit */
} qsf_extent;

/* Acquires an array from the reader's ledger and fills it with header, directory, sections,
 * and units, sorted by offset. */
qsf_status qsf_extents_create(const qsf_reader *r, qsf_extent **out, size_t *n_extents);
void qsf_extents_destroy(const qsf_reader *r, qsf_extent *extents, size_t n_extents);

/* QSF_ERR_DAMAGED if 4 GiB or more follow the last extent. The header has only the low 32 bits
 * of the file's size; this check covers the others. */
qsf_status qsf_extents_check_end(const qsf_extent *extents, size_t n_extents, uint64_t file_bytes);

/* QSF_ERR_FORMAT if two extents overlap; the text names them. */
qsf_status qsf_extents_check_apart(const qsf_extent *extents, size_t n_extents);

/* ---- sparse outliers: weights of a matrix that are too large for their block ---- */

/* qsf_outliers_find checks the entries that it returns, so its caller need not: a table of a
 * hostile file is refused and never read out of bounds. */

#define QSF_OUTLIER_ENTRY_BYTES 4 /* u16 step, f16 delta */

/* The sparse outliers of a matrix in memory. */
typedef struct qsf_outliers {
    const qsf_tensor *tensor;   /* of layout outliers */
    const unsigned char *bytes; /* [data_bytes]; NULL: the matrix has no outliers */
} qsf_outliers;

/* Computes the size of the data. False if the type or the number of entries is not allowed. The
 * caller has checked the shape. */
bool qsf_outliers_measure(const qsf_tensor *t, uint64_t *data_bytes);

/* Finds the entries of a tile row and checks that they are in order and inside it. False if they
 * are not. */
bool qsf_outliers_find(const qsf_outliers *o, size_t tile_row, const unsigned char **entries,
                       size_t *n_entries);

/* Checks all tile rows. QSF_ERR_FORMAT: the text names the first malformed one. */
qsf_status qsf_outliers_check(const qsf_outliers *o);
