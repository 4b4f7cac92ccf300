/* linear.c - runs ranges of tile rows of several matrices. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/linear.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"

/* Tile rows [first, end) of one matrix, all in one range. */
typedef struct part {
    const qsf_linear *linear;
    const qsf_acts *x;
    qsf_matmul_fn *matmul;
    uint64_t off;               /* of tile row `first` in the unit */
    const unsigned char *tiles; /* of tile row `first` */
    size_t tile_row_bytes;
    size_t first;
    size_t end;
    size_t item_tile_rows; /* number of tile rows that contain whole groups */
    size_t first_item; /* equal for two parts of a pair: an item has the same tile rows of both */
    size_t n_items;
    float *tail;  /* [n_tokens, 16] */
    bool is_fine; /* 16-bit activations for weights whose kernel takes 8 */
} part;

typedef struct range {
    const qsf_ops *ops;
    part parts[QSF_LINEAR_APART_MAX];
    size_t n_parts;
    size_t n_bytes;
    size_t head_rows;         /* of qsf_linear_run_heads, or 0 */
    atomic_bool is_malformed; /* the sparse outliers of a part are malformed */
} range;

static size_t tile_row_bytes(const qsf_linear *l)
{
    return qsf_ceil_div(l->w->n_cols, QSF_BLOCK) * qsf_dtype_tile_bytes(l->w->dtype);
}

static size_t tile_row_count(const qsf_linear *l)
{
    return qsf_ceil_div(l->w->n_rows, QSF_TILE_ROWS);
}

/* Returns the smallest number of tile rows that end where a group ends. */
static size_t group_tile_rows(size_t group_rows)
{
    size_t n = 1;
    while (n * QSF_TILE_ROWS % group_rows != 0 && n < group_rows)
        n++;
    return n;
}

/* Multiplies tile rows [begin, end) of a part; y: the first output.
 *
 * 16-bit activations are the sum of a product with q and one with q_low, each as the kernel
 * rounds it. If tokens are so few that a kernel reads the weights only once for twice as many,
 * both products run as one; else the second runs while the weights are in the cache. */
static void multiply(const range *s, const part *p, const qsf_acts *x, size_t begin, size_t end,
                     float *y, size_t y_stride, size_t worker_idx)
{
    const qsf_scratch *const scratch = s->ops->scratch;
    const unsigned char *tiles = p->tiles + (begin - p->first) * p->tile_row_bytes;
    if (!p->is_fine) {
        p->matmul(tiles, end - begin, x, y, y_stride);
        return;
    }
    const size_t n_tokens = x->n_tokens;
    const qsf_acts low = qsf_acts_low(x);
    const bool is_together =
        n_tokens <= QSF_LOW_TOGETHER && low.q == x->q + n_tokens * x->n_blocks * QSF_BLOCK;
    qsf_acts both = *x;
    both.n_tokens *= 2;
    float *const products = scratch->low_products + worker_idx * scratch->low_rows * QSF_LOW_COLS;
    const float *const low_products = products + (is_together ? n_tokens * QSF_LOW_COLS : 0);
    size_t n;
    for (size_t i = begin; i < end; i += n, y += n * QSF_TILE_ROWS) {
        n = QSF_MIN(end - i, QSF_LOW_COLS / QSF_TILE_ROWS);
        p->matmul(tiles, n, is_together ? &both : &low, products, QSF_LOW_COLS);
        if (!is_together)
            p->matmul(tiles, n, x, y, y_stride);
        for (size_t t = 0; t < n_tokens; t++) {
            if (is_together)
                memcpy(y + t * y_stride, products + t * QSF_LOW_COLS,
                       n * QSF_TILE_ROWS * sizeof *y);
            s->ops->kernels->add(y + t * y_stride, low_products + t * QSF_LOW_COLS,
                                 n * QSF_TILE_ROWS);
        }
        tiles += n * p->tile_row_bytes;
    }
}

/* Multiplies whole tile rows [begin, end) of a matrix whose heads have rows of x of their own. */
static void multiply_heads(const range *s, const part *p, size_t begin, size_t end,
                           size_t worker_idx)
{
    const qsf_linear *const l = p->linear;
    const size_t head_tile_rows = s->head_rows / QSF_TILE_ROWS;
    for (size_t i = begin; i < end;) {
        const size_t head = i / head_tile_rows;
        const size_t head_end = (head + 1) * head_tile_rows;
        const size_t to = QSF_MIN(end, head_end);
        const qsf_acts x = qsf_acts_rows(p->x, head * p->x->n_tokens, p->x->n_tokens);
        multiply(s, p, &x, i, to, l->y + i * QSF_TILE_ROWS, l->y_stride, worker_idx);
        i = to;
    }
}

/* Computes the last rows of a matrix whose row count is no multiple of 16, in `tail`, so that
 * nothing is written after them. Only one item of a part contains them. */
static void run_tail(const range *s, const part *p, size_t tile_row, size_t worker_idx)
{
    const qsf_linear *const l = p->linear;
    const qsf_acts *const x = p->x;
    const size_t row = tile_row * QSF_TILE_ROWS;
    multiply(s, p, x, tile_row, tile_row + 1, p->tail, QSF_TILE_ROWS, worker_idx);
    for (size_t t = 0; t < x->n_tokens; t++)
        memcpy(l->y + t * l->y_stride + row, p->tail + t * QSF_TILE_ROWS,
               (l->w->n_rows - row) * sizeof *l->y);
}

/* Adds sparse outliers of tile rows [begin, end), right after their products. Each thread checks
 * the entries that it uses; a pass that finds malformed ones fails. */
static void add_outliers(range *s, const part *p, size_t begin, size_t end)
{
    const qsf_linear *const l = p->linear;
    for (size_t i = begin; i < end; i++) {
        const size_t row = i * QSF_TILE_ROWS;
        const size_t rows_left = l->w->n_rows - row;
        const unsigned char *entries;
        size_t n_entries;
        if (!qsf_outliers_find(&l->outliers, i, &entries, &n_entries))
            atomic_store_explicit(&s->is_malformed, true, memory_order_relaxed);
        else if (n_entries > 0)
            s->ops->kernels->add_outliers(entries, n_entries, QSF_MIN(rows_left, QSF_TILE_ROWS),
                                          p->x, l->y + row, l->y_stride);
    }
}

/* Returns the columns that an adapter of this rank takes in `low`. */
static size_t low_cols(const qsf_low_rank *r)
{
    return qsf_round_up(r->rank, QSF_TILE_ROWS);
}

/* Moves *token to the next of tokens [*token, end) that an adapter changes, and returns the end of
 * those that it changes by the same scale from there on; *token if there are none. */
static size_t find_changed(const qsf_ops *o, const qsf_low_rank *r, size_t end, size_t *token,
                           float *scale)
{
    size_t to = *token;
    *scale = 0.0F;
    for (uint32_t i = 0; i < o->n_segments && to < end; i++) {
        const qsf_segment *const g = &o->segments[i];
        if (g->first_row + g->n_tokens <= to)
            continue;
        const float here = g->adapter_scales == NULL ? 0.0F : g->adapter_scales[r->adapter_idx];
        if (*scale != 0.0F && here != *scale)
            break;
        to = QSF_MIN(end, g->first_row + g->n_tokens);
        if (here == 0.0F)
            *token = to;
        *scale = here;
    }
    return to;
}

/* Adds the adapters of rows [row, row_end) of a matrix, of which `row` begins a tile row. */
static void add_low_rank(const range *s, const part *p, size_t row, size_t row_end)
{
    const qsf_linear *const l = p->linear;
    const size_t stride = s->ops->config->low_cols;
    const float *z = l->low;
    for (const qsf_low_rank *r = l->low_rank; r != NULL; z += low_cols(r), r = r->next) {
        const unsigned char *const b = r->b + row / QSF_TILE_ROWS * qsf_low_rank_b_bytes(r);
        for (size_t t = 0; t < p->x->n_tokens;) {
            float scale;
            const size_t end = find_changed(s->ops, r, p->x->n_tokens, &t, &scale);
            if (t < end)
                s->ops->kernels->add_low_rank(b, r->dtype != QSF_DTYPE_F16, r->rank, row_end - row,
                                              z + t * stride, stride, end - t,
                                              l->y + t * l->y_stride + row, l->y_stride);
            t = end;
        }
    }
}

/* Runs tile rows [begin, end) of a part: products, side products, bias and epilogue. */
static void run_tile_rows(range *s, const part *p, size_t begin, size_t end, size_t worker_idx)
{
    const qsf_linear *const l = p->linear;
    const qsf_acts *const x = p->x;
    const size_t n_whole = l->w->n_rows / QSF_TILE_ROWS;
    const size_t whole_end = QSF_MIN(end, n_whole);
    if (s->head_rows != 0)
        multiply_heads(s, p, begin, whole_end, worker_idx);
    else if (begin < whole_end)
        multiply(s, p, x, begin, whole_end, l->y + begin * QSF_TILE_ROWS, l->y_stride, worker_idx);
    if (end > n_whole)
        run_tail(s, p, n_whole, worker_idx);
    if (l->outliers.bytes != NULL)
        add_outliers(s, p, begin, end);
    const size_t row = begin * QSF_TILE_ROWS;
    const size_t row_end = end > n_whole ? l->w->n_rows : end * QSF_TILE_ROWS;
    add_low_rank(s, p, row, row_end);
    for (size_t t = 0; l->bias != NULL && t < x->n_tokens; t++)
        s->ops->kernels->add(l->y + t * l->y_stride + row, l->bias + row, row_end - row);
    /* A group may begin in an earlier range, or end in a later one. */
    const size_t done_begin = row - row % l->group_rows;
    const size_t done_end = row_end - row_end % l->group_rows;
    if (l->epilogue != NULL && done_begin < done_end)
        l->epilogue(l->epilogue_arg, done_begin, done_end);
}

/* Returns the first tile row of an item of a part; after the last item, the end. */
static size_t item_tile_row(const part *p, size_t item)
{
    if (item == 0)
        return p->first;
    return item >= p->n_items ? p->end : (p->first / p->item_tile_rows + item) * p->item_tile_rows;
}

static void run_items(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    range *const s = arg;
    for (size_t i = 0; i < s->n_parts; i++) {
        const part *const p = &s->parts[i];
        const size_t part_end = p->first_item + p->n_items;
        const size_t from = QSF_MAX(begin, p->first_item);
        const size_t to = QSF_MIN(end, part_end);
        if (from < to)
            run_tile_rows(s, p, item_tile_row(p, from - p->first_item),
                          item_tile_row(p, to - p->first_item), worker_idx);
    }
}

static void add_part(range *s, const qsf_linear *l, const qsf_acts *x, size_t first, size_t end)
{
    const qsf_ops *const o = s->ops;
    const size_t item_tile_rows = group_tile_rows(l->group_rows);
    const size_t n_bytes = tile_row_bytes(l);
    s->parts[s->n_parts] = (part){
        .linear = l,
        .x = x,
        .matmul =
            o->exact ? o->kernels->matmul_exact[l->w->dtype] : o->kernels->matmul[l->w->dtype],
        .off = l->w->data_off + first * n_bytes,
        .tile_row_bytes = n_bytes,
        .first = first,
        .end = end,
        .item_tile_rows = item_tile_rows,
        .n_items = qsf_ceil_div(end, item_tile_rows) - first / item_tile_rows,
        .tail = o->scratch->tails[s->n_parts % QSF_LINEAR_MAX],
        .is_fine = o->config->has_fine_acts && !o->exact && qsf_dtype_has_coarse_acts(l->w->dtype),
    };
    s->n_bytes = (size_t)(s->parts[s->n_parts].off + (end - first) * n_bytes - s->parts[0].off);
    s->n_parts++;
}

/* Runs the items of all parts on the pool. */
static void run_parts(const qsf_ops *o, range *s, bool is_paired)
{
    size_t n_items = 0;
    size_t work = 0;
    for (size_t i = 0; i < s->n_parts; i++) {
        part *const p = &s->parts[i];
        const bool is_second = is_paired && i % 2 == 1;
        p->first_item = is_second ? p[-1].first_item : n_items;
        n_items += is_second ? 0 : p->n_items;
        work += (p->end - p->first) * p->tile_row_bytes * p->x->n_tokens;
    }
    qsf_pool_run(o->pool, n_items, qsf_ops_piece(work / n_items), run_items, s);
}

/* Acquires the bytes of the range and runs it. */
static qsf_status run_range(qsf_ops *o, range *s, bool is_paired)
{
    const unsigned char *bytes;
    QSF_TRY(qsf_ops_acquire(o, s->parts[0].off, s->n_bytes, &bytes));
    for (size_t i = 0; i < s->n_parts; i++)
        s->parts[i].tiles = bytes + (s->parts[i].off - s->parts[0].off);
    run_parts(o, s, is_paired);
    if (!atomic_load_explicit(&s->is_malformed, memory_order_relaxed))
        return QSF_OK;
    for (size_t i = 0; i < s->n_parts; i++)
        if (s->parts[i].linear->outliers.bytes != NULL)
            QSF_TRY(qsf_outliers_check(&s->parts[i].linear->outliers));
    return QSF_FAIL(FORMAT, "unit %u: the sparse outliers changed while they were read",
                    s->parts[0].linear->w->unit_idx);
}

/* ---- adapters: A x of each, before the ranges of the matrices ---- */

/* Tokens of an item */
#define LOW_TOKENS 16

typedef struct low_job {
    const qsf_ops *ops;
    const qsf_linear *linears;
    size_t n_linears;
    const qsf_acts *x;
} low_job;

/* low = factor * scale * A x of tokens [first, end), for each adapter of the matrix */
static void multiply_low(const low_job *job, const qsf_linear *l, size_t first, size_t end)
{
    const qsf_ops *const o = job->ops;
    const qsf_kernels *const k = o->kernels;
    const size_t stride = o->config->low_cols;
    float *z = l->low;
    for (const qsf_low_rank *r = l->low_rank; r != NULL; z += low_cols(r), r = r->next) {
        for (size_t t = first; t < end;) {
            float scale;
            const size_t to = find_changed(o, r, end, &t, &scale);
            if (t == to)
                break;
            const qsf_acts x = qsf_acts_rows(job->x, t, to - t);
            (o->exact ? k->matmul_exact : k->matmul)[r->dtype](r->a, low_cols(r) / QSF_TILE_ROWS,
                                                               &x, z + t * stride, stride);
            for (; t < to; t++)
                k->scale(z + t * stride, r->factor * scale, r->rank);
        }
    }
}

static void run_low_items(void *arg, size_t begin, size_t end, size_t worker_idx)
{
    const low_job *const job = arg;
    (void)worker_idx;
    for (size_t i = begin; i < end; i++) {
        const size_t first = i / job->n_linears * LOW_TOKENS;
        multiply_low(job, &job->linears[i % job->n_linears], first,
                     QSF_MIN(first + LOW_TOKENS, job->x->n_tokens));
    }
}

static void run_low(const qsf_ops *o, const qsf_linear *linears, size_t n_linears,
                    const qsf_acts *x)
{
    bool has_any = false;
    for (size_t i = 0; i < n_linears && !has_any; i++)
        for (const qsf_low_rank *r = linears[i].low_rank; r != NULL && !has_any; r = r->next) {
            size_t first = 0;
            float scale;
            const size_t end = find_changed(o, r, x->n_tokens, &first, &scale);
            has_any = first < end;
        }
    if (!has_any)
        return;
    low_job job = {o, linears, n_linears, x};
    const size_t work = QSF_MIN(x->n_tokens, LOW_TOKENS) * x->n_blocks * QSF_BLOCK * QSF_TILE_ROWS;
    qsf_pool_run(o->pool, qsf_ceil_div(x->n_tokens, LOW_TOKENS) * n_linears, qsf_ops_piece(work),
                 run_low_items, &job);
}

/* Fills the range from tile row *tile_row of linears[*idx] on, and moves both after it. */
static void fill_range(range *s, size_t cap_bytes, const qsf_linear *linears, size_t n_linears,
                       const qsf_acts *x, size_t *idx, size_t *tile_row)
{
    s->n_parts = 0;
    s->n_bytes = 0;
    while (*idx < n_linears) {
        const qsf_linear *const l = &linears[*idx];
        const size_t n_bytes = tile_row_bytes(l);
        const uint64_t off = l->w->data_off + *tile_row * n_bytes;
        const uint64_t first_off = s->n_parts > 0 ? s->parts[0].off : off;
        if (off < first_off + s->n_bytes || off - first_off > cap_bytes)
            return;
        const size_t n_fitting = (cap_bytes - (size_t)(off - first_off)) / n_bytes;
        const size_t n_left = tile_row_count(l) - *tile_row;
        if (n_fitting == 0)
            return;
        const size_t n = QSF_MIN(n_left, n_fitting);
        add_part(s, l, x, *tile_row, *tile_row + n);
        *tile_row += n;
        if (n < n_left)
            return;
        *tile_row = 0;
        *idx += 1;
    }
}

static qsf_status run_linears(qsf_ops *o, const qsf_linear *linears, size_t n_linears,
                              size_t head_rows, const qsf_acts *x)
{
    assert(n_linears <= QSF_LINEAR_MAX);
    range s = {.ops = o, .head_rows = head_rows};
    size_t idx = 0;
    size_t tile_row = 0;
    run_low(o, linears, n_linears, x);
    while (idx < n_linears) {
        const qsf_tensor *const w = linears[idx].w;
        const uint64_t off = w->data_off + tile_row * tile_row_bytes(&linears[idx]);
        const size_t cap_bytes = qsf_ops_range_bytes(o, w->unit_idx, off);
        fill_range(&s, cap_bytes, linears, n_linears, x, &idx, &tile_row);
        assert(s.n_parts > 0);
        QSF_TRY(run_range(o, &s, false));
    }
    return QSF_OK;
}

qsf_status qsf_linear_run(qsf_ops *o, const qsf_linear *linears, size_t n_linears,
                          const qsf_acts *x)
{
    return run_linears(o, linears, n_linears, 0, x);
}

qsf_status qsf_linear_run_heads(qsf_ops *o, const qsf_linear *linear, size_t head_rows,
                                const qsf_acts *x)
{
    const size_t n_heads = linear->w->n_rows / head_rows;
    const qsf_acts first = qsf_acts_rows(x, 0, x->n_tokens / n_heads);
    assert(head_rows % QSF_TILE_ROWS == 0 && linear->w->n_rows % head_rows == 0);
    return run_linears(o, linear, 1, head_rows, &first);
}

qsf_status qsf_linear_run_pair(qsf_ops *o, const qsf_linear *first, const qsf_linear *second,
                               const qsf_acts *x)
{
    const size_t n_tile_rows = tile_row_count(first);
    const uint64_t begin_off = first->w->data_off;
    const uint64_t end_off = second->w->data_off + n_tile_rows * tile_row_bytes(second);
    assert(first->w->n_rows == second->w->n_rows && first->epilogue == NULL);
    if (end_off < begin_off ||
        end_off - begin_off > qsf_ops_range_bytes(o, first->w->unit_idx, begin_off)) {
        QSF_TRY(qsf_linear_run(o, first, 1, x));
        return qsf_linear_run(o, second, 1, x);
    }
    range s = {.ops = o};
    run_low(o, (const qsf_linear[]){*first, *second}, 2, x);
    add_part(&s, first, x, 0, n_tile_rows);
    add_part(&s, second, x, 0, n_tile_rows);
    assert(s.parts[0].n_items == s.parts[1].n_items);
    return run_range(o, &s, true);
}

void qsf_linear_run_apart(qsf_ops *o, const qsf_linear_apart *products, size_t n_products,
                          bool is_paired)
{
    assert(n_products <= QSF_LINEAR_APART_MAX);
    range s = {.ops = o};
    for (size_t i = 0; i < n_products; i++) {
        const qsf_linear_apart *const p = &products[i];
        add_part(&s, &p->linear, &p->x, 0, tile_row_count(&p->linear));
        s.parts[i].tiles = p->unit + p->linear.w->data_off;
        s.parts[i].tail = p->tail;
    }
    run_parts(o, &s, is_paired);
}

/* ---- around a mixer or an FFN ---- */

qsf_status qsf_block_load(qsf_ops *o, const qsf_tensor *t, size_t i, const float **out)
{
    return qsf_ops_load_vector(o, t, o->scratch->vectors[i], out);
}

qsf_status qsf_block_load_norm(qsf_ops *o, const qsf_tensor *weight, const qsf_tensor *bias,
                               qsf_norm_weights *out)
{
    QSF_TRY(qsf_block_load(o, weight, 0, &out->weight));
    return qsf_block_load(o, bias, 1, &out->bias);
}

qsf_status qsf_block_norm(qsf_ops *o, float *x, const qsf_tensor *weight, const qsf_tensor *bias,
                          qsf_acts *out)
{
    qsf_norm_weights weights;
    QSF_TRY(qsf_block_load_norm(o, weight, bias, &weights));
    *out = qsf_ops_prepare(o, x, o->config->dim, &weights, o->scratch->normed);
    return QSF_OK;
}

qsf_status qsf_block_sub_norm(qsf_ops *o, float *x, uint32_t dim, const qsf_tensor *weight,
                              qsf_acts *out)
{
    qsf_norm_weights weights;
    QSF_TRY(qsf_block_load_norm(o, weight, NULL, &weights));
    *out = qsf_ops_prepare(o, x, dim, &weights, x);
    return QSF_OK;
}

qsf_status qsf_block_load_side(qsf_ops *o, const qsf_layer *l, qsf_layer_tensor first, size_t n,
                               qsf_linear *parts)
{
    size_t n_used = 0;
    for (size_t i = 0; i < n; i++) {
        QSF_TRY(qsf_ops_load_outliers(o, l->outliers[first + i], &n_used, &parts[i].outliers));
        parts[i].low_rank = l->low_rank[first + i];
        parts[i].low = o->scratch->low + i * o->scratch->chunk_tokens * o->config->low_cols;
    }
    return QSF_OK;
}

static void residual_epilogue(const void *arg, size_t begin, size_t end)
{
    qsf_ops_add_residual(arg, begin, end);
}

qsf_status qsf_block_add_product(qsf_ops *o, const qsf_block_end *end, const qsf_acts *in)
{
    const qsf_scratch *const s = o->scratch;
    const bool is_normed = end->post_norm != NULL;
    size_t n_used = 0;
    qsf_norm_weights weights;
    qsf_linear out = qsf_linear_of(end->w, s->y, s->dim_stride);
    if (!is_normed && !end->is_kept) {
        out.epilogue = residual_epilogue;
        out.epilogue_arg = o;
    }
    QSF_TRY(qsf_block_load(o, end->bias, 0, &out.bias));
    QSF_TRY(qsf_ops_load_outliers(o, end->outliers, &n_used, &out.outliers));
    out.low_rank = end->low_rank;
    out.low = s->low;
    QSF_TRY(qsf_linear_run(o, &out, 1, in));
    if (!is_normed || end->is_kept)
        return QSF_OK;
    QSF_TRY(qsf_block_load_norm(o, end->post_norm, NULL, &weights));
    qsf_ops_add_normed(o, &weights);
    return QSF_OK;
}

qsf_status qsf_block_end_mixer(qsf_ops *o, const qsf_layer *l, float *x, uint32_t dim)
{
    const qsf_block_end end = {
        .w = l->tensors[QSF_LAYER_ATTN_OUT],
        .bias = l->tensors[QSF_LAYER_ATTN_OUT_BIAS],
        .outliers = l->outliers[QSF_LAYER_ATTN_OUT],
        .low_rank = l->low_rank[QSF_LAYER_ATTN_OUT],
        .post_norm = l->tensors[QSF_LAYER_POST_ATTN_NORM],
    };
    qsf_acts in;
    QSF_TRY(qsf_block_sub_norm(o, x, dim, l->tensors[QSF_LAYER_ATTN_SUB_NORM], &in));
    QSF_TRY(qsf_block_add_product(o, &end, &in));
    qsf_ops_lap(o, QSF_PHASE_ATTN_OUT);
    return QSF_OK;
}
