/* ops.h - the rows of a chunk, their buffers, and the operations of a transformer on them: kernel +
 * pool + stream.
 *
 * Work is split over output rows or tokens, never inside a sum, so the number of threads cannot
 * change a bit. Weights are acquired from the stream in the order of the pass, range by range
 * (linear.h): no operation assumes that a whole tensor is in memory.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/cancel.h"
#include "cache/kv/kvcache.h"
#include "cache/sequence.h"
#include "format/config.h"
#include "format/records.h"
#include "kernels/kernels.h"
#include "memory/arena.h"
#include "platform/clock.h"
#include "platform/pool.h"
#include "stream/experts.h"
#include "stream/stream.h"

/* ---- the tokens that pass through the layers together ---- */

/* Rows of a chunk belong to one or more sequences: a prompt is one segment of many tokens, a
 * batched decode is many segments of one token. Only attention distinguishes between rows. */

/* Rows first_row .. first_row + n_tokens - 1 of a chunk: consecutive positions of a sequence. */
typedef struct qsf_segment {
    qsf_sequence *sequence; /* of this segment alone; receives first_position and up */
    uint32_t first_row;
    uint32_t n_tokens;
    uint32_t first_position;
    const float *adapter_scales; /* by adapter_idx of qsf_low_rank; NULL: no adapter changes it */
} qsf_segment;

typedef struct qsf_chunk {
    const uint32_t *tokens;      /* [n_tokens], ids below n_vocab */
    uint32_t n_tokens;           /* 1 .. chunk_tokens of the scratch; the sum of the segments' */
    const qsf_segment *segments; /* [n_segments], in the order of their rows */
    uint32_t n_segments;
    /* [n_logits_rows + n_hidden_rows] rows that get logits, then rows that need only the last
     * norm; both ascending */
    const uint32_t *head_rows;
    uint32_t n_logits_rows;
    uint32_t n_hidden_rows;
    float *logits;            /* [n_logits_rows, n_vocab] */
    const qsf_cancel *cancel; /* read before each layer */
    qsf_stopwatch *stopwatch; /* started; gets a lap for each phase; may be NULL */
    /* Called before each layer, unless NULL. Returns true if it moved units of the stream. */
    bool (*before_layer)(void *arg);
    void *before_layer_arg;
    /* Fills x [n_tokens, stride] in a stage that is not the first; else NULL: the embedding does */
    qsf_status (*read_rows)(void *arg, float *x, size_t stride);
    void *read_rows_arg;
} qsf_chunk;

/* ---- the activations of one step, shared by all sessions of a model ---- */

/* Rows are tokens of the chunk. Buffers have room for the widest layer; a layer's rows lie at its
 * own strides: q_stride is its q_dim padded to 64, likewise the others. Inputs of a matmul are
 * padded to 64 columns with zeros, results to 16. `wide` rows are the chunk's, or `routed` ones if
 * these are more. */

/* Most query rows of a row group, which share a pass over the pages: query heads of one KV head,
 * times tokens. */
#define QSF_ATTEND_ROWS 64

/* Buffers of attention, beside q, k and v. Each worker uses the part at its index. */
typedef struct qsf_attend_scratch {
    uint32_t n_spans; /* most that a chunk of split_tokens sees */
    /* Larger chunks are not split over spans. */
    uint32_t split_tokens;
    float *q;                    /* [threads, 64, head_stride] query rows of the row group */
    qsf_act_row acts;            /* [threads, 64] their integers, of head_stride columns */
    float *scores;               /* [threads, 64, 256] */
    float *span_values;          /* [threads, 64, head_stride] result of one span */
    float *values;               /* [threads, 64, head_stride] sums over the spans so far */
    float *partial_values;       /* [split_tokens, heads, n_spans, head_stride] */
    qsf_span_sums *partial_sums; /* [split_tokens, heads, n_spans] */
    qsf_span_sums *carried; /* [chunk, heads] sums over the spans so far, if pages may be cold */
    unsigned char *transit; /* [qsf_kv_transit_bytes()] cold pages being attended to */
} qsf_attend_scratch;

/* 16-bit activations are two products of 8-bit kernels: outputs for which both are computed while
 * their weights are in the cache, and most tokens for which one product computes both. */
#define QSF_LOW_COLS 128
#define QSF_LOW_TOGETHER 8

/* Rows that experts compute together. An expert with more rows unpacks its weights again. */
#define QSF_EXPERT_ROWS 256

/* Buffers of the routed part, empty if no layer has experts. `routed` is the number of rows that
 * experts compute together: n_chosen for each token of the chunk, at most QSF_EXPERT_ROWS. */
typedef struct qsf_routed_scratch {
    float *scores;     /* [chunk, n_experts], rows at n_experts of the layer */
    float *biases[3];  /* [n_experts] of router and selection; scales of the experts */
    float *gates;      /* [chunk] of the dense part */
    float *weights;    /* [chunk, n_chosen] */
    uint16_t *chosen;  /* [chunk, n_chosen] */
    uint32_t *choices; /* [chunk * n_chosen] places in `chosen`, by expert */
    uint32_t *first;   /* [n_experts + 1]: the first entry of each expert in choices */
    uint32_t *units;   /* [n_experts] that some token chose */
    uint32_t *uses;    /* [n_experts] tokens that chose them */
    uint32_t *likely;  /* [n_experts] units that the next layer may want */
    float *rows;       /* [routed, dim_stride] inputs of experts that read f32 */
    float *outputs;    /* [routed, dim_stride] */
} qsf_routed_scratch;

typedef struct qsf_scratch {
    uint32_t chunk_tokens;
    size_t dim_stride; /* dim, padded to 64 */
    size_t ple_stride; /* ple_cols, padded to 64 */
    float *x;          /* [chunk, dim_stride] the residual stream */
    float *normed;     /* [chunk, dim_stride] */
    float *input; /* [chunk, dim_stride] for parallel layers, or dense parts; NULL if no layer needs
                     it */
    float *q;     /* [chunk, q_stride] queries, then the attention's result */
    float *k;     /* [chunk, kv_stride] */
    float *v;     /* [chunk, kv_stride] */
    float *attended; /* [chunk, q_stride] */
    float *mix_gate; /* [chunk, gate_stride] gates of a mixer's output */
    float *by_head;  /* [heads, chunk, nope_stride] queries that K_UP reads, of latent attention */
    float *steps;    /* [chunk, n_steps] betas, then decays, of states by heads */
    float *gate;     /* [wide, ffn_stride] input of the down projection */
    float *up;       /* [wide, ffn_stride]; NULL if the FFN has no gate */
    float *embedded; /* [chunk, dim_stride] the embedding, if there are per-layer ones */
    float *ple;      /* [chunk, ple_stride] these, of all layers */
    float *y; /* [chunk, dim_stride] output of attention or the FFN, before the residual add */
    uint32_t *positions; /* [chunk] positions of the rows in their sequences */
    qsf_segment *rest;   /* [chunk] segments of the rows that the head is for */
    float *rope_cos;     /* [chunk, pairs] of each RoPE set, one set after the other */
    float *rope_sin;     /* the same */
    qsf_kv_form kv_form; /* the same in all sessions */
    qsf_attend_scratch attend;
    float *tails[6];    /* [wide, 16] last tile rows that do not fit the output, one for each matrix
                           that runs at the same time */
    float *vectors[4];  /* [widest vector] norm weight, norm bias, and two more vectors */
    float *qk_norms[2]; /* [qk_norm_cols] weights of Q norm and K norm */
    float *ones;        /* [ones] of the config: weights of V norms */
    float *conv;        /* [conv_cols] weights, then zeros: [conv_channels] */
    float *head_bias;   /* [n_vocab], if the head has one */
    float *blocks;      /* [n_blocks, chunk, dim_stride] of residual blocks that have ended */
    float *messages;    /* [n_loop_blocks, chunk, dim_stride] of the last pass over looped layers */
    float *queries;     /* [7 * dim] of a layer's blocks, then of its messages */
    float *relative;    /* [chunk, relative_stride] relative vectors of the heads */
    float *profiles;    /* [n_profiles] */
    float *sinks;       /* [chunk, heads, padded] sinks of each token */
    unsigned char *outliers; /* [config's outliers_bytes] those in use at the same time */
    float *low; /* [3, chunk, low_cols of the config] what adapters make of the inputs of matrices
                   that run at the same time */
    qsf_routed_scratch routed;
    /* [wide] rows of matmul input as integers, of the widest input. q_low follows q of the rows in
     * use; with 16-bit activations the description of q_low (qsf_acts_low) follows that of q. */
    qsf_act_row acts;
    float *low_products; /* [threads, low_rows, QSF_LOW_COLS], with 16-bit activations */
    size_t low_rows;
} qsf_scratch;

/* The sizes that the scratch depends on. */
typedef struct qsf_scratch_sizes {
    uint32_t chunk_tokens;
    uint32_t n_threads;
} qsf_scratch_sizes;

/* Call once on a measuring arena and once on the real one, whose memory is zeroed. Of the pool only
 * its sizes are read. */
void qsf_scratch_layout(qsf_scratch *s, qsf_arena *a, const qsf_config *c, const qsf_kv_pool *pool,
                        const qsf_scratch_sizes *sizes);

/* The frequencies of layers that share a set's number, for the context of the model. */
typedef struct qsf_rope {
    bool is_interleaved;
    size_t n_pairs;
    size_t first_pair;        /* pairs of the sets before it */
    float factor;             /* of cos and sin */
    const float *frequencies; /* [n_pairs] */
} qsf_rope;

/* Fills ropes [n_ropes]. `made` [n_made_pairs] receives the frequencies computed from header and
 * ARCH. */
void qsf_ropes_choose(const qsf_config *c, const qsf_reader *r, uint32_t ctx_tokens, float *made,
                      qsf_rope *ropes);

/* Computes cos and sin [chunk_tokens, n_pairs] of each set, one set after the other, for
 * positions [n_tokens]. */
void qsf_ropes_fill(const qsf_rope *ropes, uint32_t n_ropes, const uint32_t *positions,
                    uint32_t n_tokens, size_t chunk_tokens, float *rope_cos, float *rope_sin);

typedef struct qsf_ops {
    const qsf_config *config;
    const qsf_kernels *kernels;
    qsf_pool *pool;
    qsf_stream *stream;
    qsf_experts *experts;
    const unsigned char
        *apart; /* raw bytes of another unit, which is used instead of the stream's; or NULL */
    qsf_scratch *scratch;
    const qsf_rope *ropes;       /* [n_ropes of the config] */
    const qsf_layer_kind *kind;  /* of the layer that runs */
    bool stores_only;            /* a mixer ends when keys and values are stored */
    bool exact;                  /* f32 activations for all weight types */
    uint32_t n_tokens;           /* rows of the current chunk */
    const qsf_segment *segments; /* [n_segments] of these rows */
    uint32_t n_segments;
    qsf_stopwatch *stopwatch; /* of the chunk, or NULL */
} qsf_ops;

/* Ends a lap of `phase`. After a parallel run the pool has the end time; otherwise the clock is
 * read. */
void qsf_ops_lap(const qsf_ops *o, qsf_phase phase);

/* Returns the smallest number of items in a piece of a parallel loop. A hand-over costs about a
 * microsecond, as much as 16 KiB of weights or 16 Ki multiply-adds. */
size_t qsf_ops_piece(size_t work_per_item);

size_t qsf_ops_range_bytes(const qsf_ops *o, uint32_t unit_idx, uint64_t off);
qsf_status qsf_ops_acquire(qsf_ops *o, uint64_t off, size_t n_bytes, const unsigned char **out);

/* *out = a vector tensor [n_cols] of the current unit as f32, valid until the unit ends: in place
 * if it is resident and f32, else a copy in space [n_cols]. NULL for a NULL tensor. */
qsf_status qsf_ops_load_vector(qsf_ops *o, const qsf_tensor *t, float *space, const float **out);

/* *out = the sparse outliers of a matrix of the current unit, valid until the unit ends: in place
 * if resident, else a copy in the scratch from byte *n_used on. *n_used grows by its size. None for
 * a NULL tensor. */
qsf_status qsf_ops_load_outliers(qsf_ops *o, const qsf_tensor *t, size_t *n_used,
                                 qsf_outliers *out);

/* Returns the sum of a[i] * b[i], n of them: 16 lanes of fmaf, added pairwise. */
float qsf_ops_dot(const float *a, const float *b, uint32_t n);

/* A norm: the weight [dim] and the bias [dim], which may be NULL. A NULL weight means no norm. */
typedef struct qsf_norm_weights {
    const float *weight;
    const float *bias;
} qsf_norm_weights;

/* Normalises a row, x [n], as the model does: RMS or layer norm. out may be x. */
void qsf_ops_norm_row(const qsf_ops *o, const float *x, const qsf_norm_weights *norm, size_t n,
                      float *out);

/* out [n_tokens, dim_stride] = norm(x [n_tokens, dim_stride]); out may be x. */
void qsf_ops_norm(qsf_ops *o, const float *x, const qsf_norm_weights *norm, float *out);

/* Describes the rows of x [n_tokens, dim] as matmul input: normalised if there is a norm that has a
 * weight, and quantised unless exact, row by row in one pass. Rows lie at dim padded to 64; the
 * padding becomes zero. Normalised rows go to `normed`, which may be x. Valid until the next
 * prepare or gather. */
qsf_acts qsf_ops_prepare(qsf_ops *o, float *x, uint32_t dim, const qsf_norm_weights *norm,
                         float *normed);

/* Describes rows[0 .. n_tokens) of x, which lie at dim_stride and are padded with zeros, as matmul
 * input: quantised unless exact, and copied to `copies`. Without copies only quantised weights may
 * read it. Valid until the next prepare or gather. */
qsf_acts qsf_ops_gather(qsf_ops *o, const float *x, const uint32_t *rows, float *copies);

/* gate[begin .. end) of n rows becomes activation(gate) * up for gated layers, else
 * activation(gate). */
void qsf_ops_activate(const qsf_ops *o, size_t first_row, size_t n, size_t begin, size_t end);

/* gate[begin .. end) of all rows, which lie at `stride`, becomes activation(gate) * up. */
void qsf_ops_activate_gated(const qsf_ops *o, size_t stride, size_t begin, size_t end);

/* x[begin .. end) += factor of the layer * y[begin .. end) for every row of the chunk. */
void qsf_ops_add_residual(const qsf_ops *o, size_t begin, size_t end);

/* x += factor of the layer * norm(y) for every row of the chunk. */
void qsf_ops_add_normed(qsf_ops *o, const qsf_norm_weights *norm);

/* Returns q_low of x as 8-bit activations of their own, with 16-bit activations. x is that of
 * qsf_ops_prepare or qsf_ops_gather, or rows of it. */
qsf_acts qsf_acts_low(const qsf_acts *x);

/* Returns the destination that is n values, a multiple of 64, behind that of a. */
static inline qsf_act_row qsf_act_row_at(const qsf_act_row *a, size_t n)
{
    const size_t block = n / QSF_BLOCK;
    return (qsf_act_row){a->q + n,           a->q_low + n,     a->scale + block,
                         a->sum + block,     a->parts + block, a->scaled_sum + block,
                         a->fine_sum + block};
}

/* Returns n_tokens rows of n_blocks blocks as matmul input; f32: as in qsf_acts, or NULL. */
static inline qsf_acts qsf_acts_of(const qsf_act_row *a, size_t n_tokens, size_t n_blocks,
                                   const float *f32)
{
    return (qsf_acts){n_tokens, n_blocks, f32,      a->q,          a->q_low,
                      a->scale, a->sum,   a->parts, a->scaled_sum, a->fine_sum};
}

/* Returns rows [first, first + n) of x. */
qsf_acts qsf_acts_rows(const qsf_acts *x, size_t first, size_t n);

/* ---- which positions a token sees, and in which spans (256 positions) and slots they are ---- */

/* Positions first .. end - 1, and those below `pinned`, which is 0 or below `first` */
typedef struct qsf_seen {
    size_t pinned;
    size_t first;
    size_t end;
} qsf_seen;

/* Returns the positions that a token of a segment sees: itself and earlier ones, of an encoder also
 * later ones, within the window or pinned. */
qsf_seen qsf_seen_at(const qsf_layer_kind *k, const qsf_segment *g, size_t position);

/* Returns the slots that are seen in the span from position `begin` on, from the first to the
 * last; slots between pinned positions and the window are among them. Begin and end are 0 if
 * there are none. */
qsf_span_range qsf_seen_slots(qsf_seen seen, size_t begin);

/* n spans in ascending order: spans 0 .. n_pinned - 1, then the spans from `first` on. */
typedef struct qsf_spans {
    size_t n_pinned;
    size_t first;
    size_t n;
} qsf_spans;

/* Returns the spans that the tokens of a segment see. */
qsf_spans qsf_seen_spans(const qsf_layer_kind *k, const qsf_segment *g);

/* Returns the most spans that tokens of a segment of chunk_tokens see. */
size_t qsf_seen_most_spans(const qsf_layer_kind *k, size_t chunk_tokens, size_t ctx_tokens);

/* Returns span i of `s`. */
static inline size_t qsf_span_at(const qsf_spans *s, size_t i)
{
    return i < s->n_pinned ? i : s->first + (i - s->n_pinned);
}

/* ---- attention of a chunk ---- */

/* ---- norms, RoPE and storing of the heads of q, k and v before attention ---- */

/* The first three functions are for epilogues of the matmuls. Each works on one head, whose rows
 * are complete; different threads may work on different heads or rows. */

/* Finishes head `head` of q in rows begin .. end - 1: the head's own norm if there is one, the
 * query temperature, RoPE, and Hadamard if the cache is rotated. weight: of the Q norm, or NULL */
void qsf_heads_finish_q(const qsf_ops *o, const float *weight, uint32_t head, size_t begin,
                        size_t end);

/* x [n] *= the query temperature of row t */
void qsf_heads_heat(const qsf_ops *o, float *x, size_t n, size_t t);

/* Finishes KV head `kv_head` of k likewise, without a temperature, and stores it. */
void qsf_heads_store_k(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                       const float *weight, uint32_t kv_head, size_t begin, size_t end);

/* Rotates KV head `kv_head` of v by Hadamard if the cache is rotated, and stores it, for all
 * rows. */
void qsf_heads_store_v(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer, uint32_t kv_head);

/* Apply the epilogue to row t of latent attention. A query has two parts: that for K_UP gets the
 * temperature, the other RoPE and Hadamard too. The latent k [head_dim] is rotated, its parts
 * separately, and stored as the key, whose first part is the value. */
void qsf_heads_turn_latent_q(const qsf_ops *o, size_t t, float *nope, float *rope);
void qsf_heads_store_latent(const qsf_ops *o, const qsf_chunk *chunk, uint32_t layer, size_t t,
                            float *k);

/* Normalises q and k over their whole width, then finishes all heads of all rows. */
void qsf_heads_finish_whole(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                            const float *q_weight, const float *k_weight);

/* Multiplies the parts [n] of x, which are of the heads of row t, by the sigmoid of their gates. */
void qsf_heads_gate(const qsf_ops *o, size_t t, float *x, size_t n);

/* What is added to the scores of a layer, beside ALiBi */
typedef struct qsf_score_terms {
    const float *sinks; /* [n_heads]: a score of each head that has no value; or NULL */
    size_t sink_stride; /* floats from a row's sinks to the next one's; 0: all have the same */
    /* A bias of distance d below the extent is relative . profile(d), of each head; or NULL */
    const float *relative; /* [n_tokens, relative_stride], the heads' one after another */
    size_t relative_stride;
    const float *profiles; /* [relative_dim, extent], the farthest distance first */
} qsf_score_terms;

/* attended = softmax(score(q . k)) . v for every token and head of the chunk, whether a prompt, one
 * token, or tokens of many sequences. The layer's kind and the terms say how q . k becomes a
 * score. Errors are of the files of cold pages
 * (cache/kv/kvcache.h). */
qsf_status qsf_attention_run(qsf_ops *o, const qsf_chunk *chunk, uint32_t layer,
                             const qsf_score_terms *terms);

/* Multiplies what was attended by its gate, and returns where that is: [n_tokens, q_stride]. */
float *qsf_attention_gate(qsf_ops *o);

/* The argument of the epilogues and loops of a mixer with attention */
typedef struct qsf_mix_job {
    const qsf_ops *ops;
    const qsf_chunk *chunk;
    uint32_t layer_idx;  /* of the keys and values */
    const float *q_norm; /* weights, or NULL */
    const float *k_norm;
    qsf_score_terms terms;
} qsf_mix_job;

/* Loads the norms and the sinks of a layer. */
qsf_status qsf_attention_load(qsf_ops *o, const qsf_layer *l, qsf_mix_job *job);

/* ---- the feed-forward part of a layer: dense, routed to experts, or both ---- */

/* x += dense(norm(x)) + experts(norm(x)) for the rows of the chunk, either of which may be missing.
 * Errors of the stream and of the experts. */
qsf_status qsf_ffn_run(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx);

/* ---- the routed part: the experts that each token of a chunk chose ---- */

/* Tokens are sorted by expert; experts run in ascending order and add weight * output to the rows
 * of their tokens. So a row's sum has one order, whatever else is in the chunk, is cached or runs
 * at the same time. */

/* Chooses the experts of every row of x, the router's input, and requests them. Comes before the
 * dense part in the file. */
qsf_status qsf_routed_choose(qsf_ops *o, const qsf_layer *l, uint32_t layer_idx, const qsf_acts *x);

/* Computes the gates of the dense part, whose input x is. */
qsf_status qsf_routed_gates(qsf_ops *o, const qsf_layer *l, const qsf_acts *x);

/* y, the dense part's output, or 0 without one, is multiplied by its gate and normalised, if the
 * layer does so; then the experts' outputs for x are added, after normalising their sum if the
 * layer does so. Ends the request. */
qsf_status qsf_routed_add(qsf_ops *o, const qsf_layer *l, const float *x);

/* ---- which experts a token uses, and their weights: docs/format.md, section 7 ---- */

/* A changed choice affects a token more than any rounding: all of it is f32 in a fixed order. */

/* Chooses the experts of one token. logits [n_experts] become scores. selection_bias [n_experts] or
 * NULL. chosen [n_chosen] ascends; weights [n_chosen] are theirs. Of equal scores, and of NaN, the
 * lower number is chosen. */
void qsf_routing_choose(const qsf_kernels *k, const qsf_layer_kind *kind, float *logits,
                        const float *selection_bias, uint16_t *chosen, float *weights);
