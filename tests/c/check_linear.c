/* check_linear.c - groups of matrices: every row once and in place, groups finished once and when
 * they are complete, whatever the window, the threads, and the sizes of the groups.
 *
 * The kernels here are stubs that answer with a checksum of the tiles they were given, so a tile
 * row that went to the wrong place shows.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>
#include <stdlib.h>

#include "check.h"
#include "checksum/crc32.h"
#include "format/records.h"
#include "stream/stream.h"
#include "model/linear.h"
#include "system.h"
#include "tiny_file.h"
#include "unit_pass.h"

#define N_TOKENS 40 /* enough work for several pieces */
#define Y_STRIDE 96
#define MAX_ROWS 80
#define N_MATRICES 3
#define UNTOUCHED (-7.0F)

static const char path[] = "check_linear.qsf";
static tiny_file file;
static const uint32_t n_rows_of[N_MATRICES] = {72, 24, 40}; /* 72 and 24: tails; 40: too */
static bool is_fine; /* 16-bit activations: the 4-bit stub is called for both halves */
static const uint8_t dtype_of[N_MATRICES] = {QSF_DTYPE_8BIT, QSF_DTYPE_4BIT, QSF_DTYPE_F16};

/* Layer 1 is three matrices with headers between; layer 2 a pair of 72 rows. */
static bool build(void)
{
    static const uint32_t types[N_MATRICES] = {QSF_TENSOR_Q, QSF_TENSOR_K, QSF_TENSOR_V};
    tiny_file *const f = &file;
    const tiny_options options = {{QSF_COMPRESSION_NONE, QSF_COMPRESSION_NONE}, false, false};
    const unsigned char ebnd[(TINY_VOCAB + 15) / 16 * 4] = {0};
    memset(f, 0, sizeof *f);
    f->n_bytes = TINY_TABLES_OFF + 10 * QSF_DIRECTORY_ENTRY_BYTES;
    tiny_add_arch(f, &options);
    tiny_add_section(f, "EBND", 8, ebnd, sizeof ebnd);
    tiny_add_tensor(f, 0, QSF_TENSOR_EMBEDDING, TINY_VOCAB, TINY_DIM, QSF_DTYPE_8BIT, 1);
    tiny_end_unit(f, QSF_UNIT_EMBEDDING, 0);
    for (int i = 0; i < N_MATRICES; i++)
        tiny_add_tensor(f, 1, types[i], n_rows_of[i], 64, dtype_of[i], 1);
    tiny_end_unit(f, QSF_UNIT_LAYER, options.compression[0]);
    tiny_add_tensor(f, 2, QSF_TENSOR_FFN_GATE, 72, 64, QSF_DTYPE_8BIT, 1);
    tiny_add_tensor(f, 2, QSF_TENSOR_FFN_UP, 72, 64, QSF_DTYPE_4BIT, 1);
    tiny_end_unit(f, QSF_UNIT_LAYER, options.compression[1]);
    tiny_add_tensor(f, 3, QSF_TENSOR_FINAL_NORM, 1, TINY_DIM, QSF_DTYPE_F32, 0);
    tiny_add_tensor(f, 3, QSF_TENSOR_HEAD, TINY_VOCAB, TINY_DIM, QSF_DTYPE_4BIT, 1);
    tiny_end_unit(f, QSF_UNIT_FINAL, 0);
    tiny_add_tables(f);
    tiny_fill_header(f, &options);
    repair_checksums(f->bytes, f->n_bytes);
    return CHECK(tiny_write(path, f->bytes, f->n_bytes));
}

/* What the stubs say of a row of a tile row, for a token. */
static float answer(uint32_t tiles_crc, size_t row_in_tile, size_t token)
{
    return (float)(tiles_crc & 0xFFFF) + (float)row_in_tile / 32.0F + (float)token * 65536.0F;
}

static void stub(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x, float *y,
                 size_t y_stride, uint8_t dtype)
{
    const size_t n_bytes = x->n_blocks * qsf_dtype_tile_bytes(dtype);
    for (size_t i = 0; i < n_tile_rows; i++) {
        const uint32_t crc = qsf_crc32(0, tiles + i * n_bytes, n_bytes);
        for (size_t t = 0; t < x->n_tokens; t++)
            for (size_t r = 0; r < QSF_TILE_ROWS; r++)
                y[t * y_stride + i * QSF_TILE_ROWS + r] = answer(crc, r, t);
    }
}

static void stub_8bit(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x, float *y,
                      size_t y_stride)
{
    stub(tiles, n_tile_rows, x, y, y_stride, QSF_DTYPE_8BIT);
}

static void stub_4bit(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x, float *y,
                      size_t y_stride)
{
    stub(tiles, n_tile_rows, x, y, y_stride, QSF_DTYPE_4BIT);
}

static void stub_f16(const unsigned char *tiles, size_t n_tile_rows, const qsf_acts *x, float *y,
                     size_t y_stride)
{
    stub(tiles, n_tile_rows, x, y, y_stride, QSF_DTYPE_F16);
}

/* One matrix's result, with what it must be. */
typedef struct result {
    float y[N_TOKENS * Y_STRIDE];
    float expected[N_TOKENS * MAX_ROWS];
    float bias[MAX_ROWS];
    atomic_uint n_finished[MAX_ROWS]; /* by row */
    atomic_uint n_wrong;
    size_t n_rows;
    size_t group_rows;
    const struct result *other; /* must be complete too, in these rows */
} result;

static bool is_complete(const result *r, size_t begin, size_t end)
{
    size_t n_wrong = 0;
    for (size_t t = 0; t < N_TOKENS; t++)
        for (size_t i = begin; i < end; i++)
            n_wrong += r->y[t * Y_STRIDE + i] != r->expected[t * MAX_ROWS + i];
    return n_wrong == 0;
}

static void epilogue(const void *arg, size_t begin, size_t end)
{
    result *const r = *(result *const *)arg;
    if (begin % r->group_rows != 0 || end % r->group_rows != 0 || end > r->n_rows ||
        !is_complete(r, begin, end) || (r->other != NULL && !is_complete(r->other, begin, end)))
        atomic_fetch_add(&r->n_wrong, 1);
    for (size_t i = begin; i < end && i < MAX_ROWS; i++)
        atomic_fetch_add(&r->n_finished[i], 1);
}

static void prepare(result *r, const qsf_reader *reader, const qsf_tensor *w, size_t group_rows,
                    bool has_bias)
{
    const size_t n_bytes = qsf_dtype_tile_bytes(w->dtype); /* of a tile row: one tile */
    const unsigned char *const tiles = file.bytes + reader->units[w->unit_idx].off + w->data_off;
    const float n_products = is_fine && w->dtype == QSF_DTYPE_4BIT ? 2.0F : 1.0F;
    memset(r, 0, sizeof *r);
    r->n_rows = w->n_rows;
    r->group_rows = group_rows;
    for (size_t i = 0; i < N_TOKENS * Y_STRIDE; i++)
        r->y[i] = UNTOUCHED;
    for (size_t i = 0; i < w->n_rows; i++) {
        const uint32_t crc = qsf_crc32(0, tiles + i / QSF_TILE_ROWS * n_bytes, n_bytes);
        r->bias[i] = has_bias ? (float)(i + 1) * 1024.0F : 0.0F;
        for (size_t t = 0; t < N_TOKENS; t++)
            r->expected[t * MAX_ROWS + i] =
                n_products * answer(crc, i % QSF_TILE_ROWS, t) + r->bias[i];
    }
}

static void check_result(result *r)
{
    bool ok = CHECK(is_complete(r, 0, r->n_rows));
    ok &= CHECK_EQ(r->n_wrong, 0);
    size_t n_bad = 0;
    for (size_t i = 0; i < r->n_rows; i++)
        n_bad += r->n_finished[i] != 1;
    for (size_t t = 0; t < N_TOKENS; t++)
        for (size_t i = r->n_rows; i < Y_STRIDE; i++)
            n_bad += r->y[t * Y_STRIDE + i] != UNTOUCHED;
    ok &= CHECK_EQ(n_bad, 0);
    if (!ok && check_is_printed())
        printf("    %zu rows in groups of %zu\n", r->n_rows, r->group_rows);
}

static qsf_linear describe(const qsf_tensor *w, result **r, bool has_bias)
{
    qsf_linear l = qsf_linear_of(w, (*r)->y, Y_STRIDE);
    l.bias = has_bias ? (*r)->bias : NULL;
    l.group_rows = (*r)->group_rows;
    l.epilogue = epilogue;
    l.epilogue_arg = r;
    return l;
}

static result results[N_MATRICES];
static float tails[N_MATRICES][N_TOKENS * QSF_TILE_ROWS];

static void run_layer(qsf_ops *o, const qsf_acts *x, const qsf_reader *reader,
                      const size_t *group_rows, bool has_bias)
{
    result *at[N_MATRICES];
    qsf_linear linears[N_MATRICES];
    const qsf_tensor *const w = &reader->tensors[reader->units[1].first_tensor];
    for (size_t i = 0; i < N_MATRICES; i++) {
        prepare(&results[i], reader, &w[i], group_rows[i], has_bias);
        at[i] = &results[i];
        linears[i] = describe(&w[i], &at[i], has_bias);
    }
    CHECK_OK(qsf_stream_begin_unit(o->stream, 1));
    CHECK_OK(qsf_linear_run(o, linears, N_MATRICES, x));
    CHECK_OK(qsf_stream_end_unit(o->stream));
    for (size_t i = 0; i < N_MATRICES; i++)
        check_result(&results[i]);
}

/* The pair of layer 2: as it is streamed, or from memory, of which each part knows its place. */
static void run_pair(qsf_ops *o, const qsf_acts *x, const qsf_reader *reader, bool has_bias,
                     bool is_apart)
{
    const qsf_tensor *const w = &reader->tensors[reader->units[2].first_tensor];
    result *at[2] = {&results[0], &results[1]};
    const unsigned char *unit;
    for (size_t i = 0; i < 2; i++)
        prepare(&results[i], reader, &w[i], 1, has_bias);
    results[1].other = is_apart ? NULL : &results[0];
    qsf_linear first = describe(&w[0], &at[0], has_bias);
    const qsf_linear second = describe(&w[1], &at[1], has_bias);
    first.epilogue = NULL;
    CHECK_OK(qsf_stream_begin_unit(o->stream, 2));
    if (is_apart && CHECK_OK(qsf_stream_acquire(o->stream, 0, 1, &unit))) {
        const qsf_linear_apart apart[] = {{first, unit, *x, tails[0]},
                                          {second, unit, *x, tails[1]}};
        qsf_linear_run_apart(o, apart, 2, true);
    } else {
        CHECK_OK(qsf_linear_run_pair(o, &first, &second, x));
    }
    CHECK_OK(qsf_stream_end_unit(o->stream));
    for (size_t i = 0; i < results[0].n_rows; i++)
        atomic_store(&results[0].n_finished[i], 1); /* it has none */
    check_result(&results[0]);
    check_result(&results[1]);
}

static void run_all(qsf_stream *stream, const qsf_reader *reader, uint32_t n_threads)
{
    static const size_t groups[][N_MATRICES] = {{1, 1, 1},   {8, 8, 8},   {24, 24, 40},
                                                {72, 12, 5}, {36, 3, 10}, {16 - 7, 24, 20}};
    qsf_scratch scratch = {0};
    qsf_kernels kernels;
    qsf_pool *pool;
    void *const block = check_alloc(64, qsf_pool_bytes(n_threads));
    memset(block, 0, qsf_pool_bytes(n_threads));
    CHECK_OK(qsf_pool_init(block, n_threads, false, &pool));
    qsf_kernels_init(&kernels, QSF_ISA_SCALAR);
    kernels.matmul[QSF_DTYPE_8BIT] = stub_8bit;
    kernels.matmul[QSF_DTYPE_4BIT] = stub_4bit;
    kernels.matmul[QSF_DTYPE_F16] = stub_f16;
    for (size_t i = 0; i < N_MATRICES; i++)
        scratch.tails[i] = tails[i];
    const qsf_config config = {.has_fine_acts = is_fine};
    static int8_t q[2 * N_TOKENS * QSF_BLOCK];
    static const float scale[2 * N_TOKENS];
    static const int32_t sum[2 * N_TOKENS];
    static const qsf_act_parts parts[2 * N_TOKENS];
    static float low_products[3][N_TOKENS * QSF_LOW_COLS];
    scratch.low_rows = N_TOKENS;
    scratch.low_products = low_products[0];
    qsf_ops o = {.config = &config,
                 .kernels = &kernels,
                 .pool = pool,
                 .stream = stream,
                 .scratch = &scratch};
    const qsf_acts x = {.n_tokens = N_TOKENS,
                        .n_blocks = 1,
                        .q = q,
                        .q_low = q + N_TOKENS * QSF_BLOCK,
                        .scale = scale,
                        .sum = sum,
                        .parts = parts,
                        .scaled_sum = scale};
    for (size_t i = 0; i < COUNT_OF(groups); i++)
        run_layer(&o, &x, reader, groups[i], i % 2 == 0);
    for (int i = 0; i < (qsf_stream_is_resident(stream, 2) ? 4 : 2); i++)
        run_pair(&o, &x, reader, i % 2 != 0, i >= 2);
    if (n_threads > 1)
        CHECK(qsf_pool_count(pool).n_shared_runs > 0);
    qsf_pool_destroy(pool);
    check_free(block);
}

/* Every window from a tile row to the whole, then everything resident. */
static void check_windows(uint32_t n_threads)
{
    for (size_t extra_bytes = 0; extra_bytes <= 24576; extra_bytes += 896) {
        pass_file f;
        if (!CHECK_OK(pass_open_file(&f, path, extra_bytes > 24000 ? 15 : 0, extra_bytes)))
            return;
        run_all(&f.pass.stream, &f.reader, n_threads);
        CHECK_EQ_U64(pass_close_file(&f), 0);
    }
}

int main(void)
{
    if (build()) {
        check_windows(1);
        check_windows(2);
        check_windows(3);
        is_fine = true;
        check_windows(2);
    }
    remove(path);
    return check_report("check_linear");
}
