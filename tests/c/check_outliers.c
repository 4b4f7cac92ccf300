/* check_outliers.c - side tables: what a reader refuses, and that what they add is added, once and
 * in its order, whatever the instruction set, the window and the threads.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "base/fused.h"
#include "base/half.h"
#include "check.h"
#include "format/records.h"
#include "format/outliers.h"
#include "stream/stream.h"
#include "stream/contents.h"
#include "model/linear.h"
#define TINY_CAP_BYTES 262144
#include "system.h"
#include "tiny_model.h"
#include "unit_pass.h"

#define N_TOKENS 9 /* fours, and one more */
#define N_COLS 100 /* two blocks, the second cut off */
#define X_STRIDE 128
#define MAX_ROWS 72
#define Y_STRIDE 80

static const char path[] = "check_outliers.qsf";
static tiny_file file;
static float acts[N_TOKENS * X_STRIDE];

/* Layer 1: three matrices, the last without a side table. Layer 2: a pair. */
static const uint32_t n_rows_of[] = {72, 24, 40};

static bool build(void)
{
    tiny_file *const f = &file;
    const tiny_options options = {{QSF_COMPRESSION_NONE, QSF_COMPRESSION_LZ4}, false, false};
    const unsigned char ebnd[(TINY_VOCAB + 15) / 16 * 4] = {0};
    memset(f, 0, sizeof *f);
    f->n_bytes = TINY_TABLES_OFF + 10 * QSF_DIRECTORY_ENTRY_BYTES;
    tiny_add_arch(f, &options);
    tiny_add_section(f, "EBND", 8, ebnd, sizeof ebnd);
    tiny_add_tensor(f, 0, QSF_TENSOR_EMBEDDING, TINY_VOCAB, TINY_DIM, QSF_DTYPE_8BIT, 1);
    tiny_end_unit(f, QSF_UNIT_EMBEDDING, 0);
    tiny_add_outliers(f, 1, QSF_TENSOR_Q_OUTLIERS, n_rows_of[0], N_COLS, 101);
    tiny_add_outliers(f, 1, QSF_TENSOR_K_OUTLIERS, n_rows_of[1], N_COLS, 173);
    for (uint32_t i = 0; i < 3; i++)
        tiny_add_tame(f, 1, QSF_TENSOR_Q + i, n_rows_of[i], N_COLS, QSF_DTYPE_F16, 1);
    tiny_end_unit(f, QSF_UNIT_LAYER, options.compression[0]);
    tiny_add_outliers(f, 2, QSF_TENSOR_FFN_GATE_OUTLIERS, 72, N_COLS, 111);
    tiny_add_outliers(f, 2, QSF_TENSOR_FFN_UP_OUTLIERS, 72, N_COLS, 1600); /* one a tile row */
    tiny_add_tame(f, 2, QSF_TENSOR_FFN_GATE, 72, N_COLS, QSF_DTYPE_F16, 1);
    tiny_add_tame(f, 2, QSF_TENSOR_FFN_UP, 72, N_COLS, QSF_DTYPE_F16, 1);
    tiny_end_unit(f, QSF_UNIT_LAYER, options.compression[1]);
    tiny_add_tensor(f, 3, QSF_TENSOR_FINAL_NORM, 1, TINY_DIM, QSF_DTYPE_F32, 0);
    tiny_add_tensor(f, 3, QSF_TENSOR_HEAD, TINY_VOCAB, TINY_DIM, QSF_DTYPE_4BIT, 1);
    tiny_end_unit(f, QSF_UNIT_FINAL, 0);
    tiny_add_tables(f);
    tiny_fill_header(f, &options);
    repair_checksums(f->bytes, f->n_bytes);
    return CHECK(tiny_write(path, f->bytes, f->n_bytes));
}

/* What a table adds to y [N_TOKENS, y_stride] of all rows, by the text of docs/format.md. */
static void add_naively(const unsigned char *table, size_t n_rows, float *y, size_t y_stride)
{
    const size_t n_tile_rows = (n_rows + 15) / 16;
    const unsigned char *const entries = table + 4 * (n_tile_rows + 1);
    for (size_t i = 0; i < n_tile_rows; i++) {
        long position = -1;
        for (size_t e = qsf_load_u32(table + 4 * i); e < qsf_load_u32(table + 4 * i + 4); e++) {
            position += qsf_load_u16(entries + 4 * e);
            const float delta = qsf_half_to_float(qsf_load_u16(entries + 4 * e + 2));
            const size_t row = 16 * i + (size_t)position % 16;
            for (size_t t = 0; t < N_TOKENS; t++) {
                float *const at = &y[t * y_stride + row];
                *at = fmaf(delta, acts[t * X_STRIDE + (size_t)position / 16], *at);
            }
        }
    }
}

static float noise(uint32_t i)
{
    const uint32_t bits = i * 2654435761U;
    return (float)((bits >> 8) % 4001U) / 1000.0F - 2.0F;
}

/* ---- the kernel ---- */

static void check_kernel(qsf_isa isa)
{
    const qsf_acts x = {.n_tokens = N_TOKENS, .n_blocks = X_STRIDE / QSF_BLOCK, .f32 = acts};
    qsf_kernels kernels;
    qsf_kernels_init(&kernels, isa);
    for (size_t n_rows = 1; n_rows <= 16; n_rows++)
        for (uint32_t n_entries = 0; n_entries <= 117; n_entries += 13) {
            unsigned char table[8 + 4 * 117] = {0};
            uint32_t position = 0;
            qsf_store_u32(table + 4, n_entries);
            for (uint32_t i = 0; i < n_entries; i++) {
                uint32_t step = 1 + (i * 7 + n_entries) % 8;
                while ((position + step - 1) % 16 >= n_rows)
                    step++;
                position += step;
                qsf_store_u16(table + 8 + 4 * i, (uint16_t)step);
                const uint16_t subnormal = (uint16_t)(0x8000 + 37 * i + 1);
                qsf_store_u16(table + 10 + 4 * i,
                              i % 5 == 1 ? subnormal : qsf_half_from_float(9.0F * noise(i + 1)));
            }
            float y[N_TOKENS * Y_STRIDE];
            float expected[N_TOKENS * Y_STRIDE];
            for (uint32_t i = 0; i < N_TOKENS * Y_STRIDE; i++)
                y[i] = expected[i] = noise(i + 77);
            add_naively(table, n_rows, expected, Y_STRIDE);
            kernels.add_outliers(table + 8, n_entries, n_rows, &x, y, Y_STRIDE);
            CHECK_BYTES(y, expected, sizeof y);
        }
}

/* ---- what is refused ---- */

static bool is_good(const qsf_tensor *t, const unsigned char *table)
{
    const qsf_outliers o = {t, table};
    const qsf_status status = qsf_outliers_check(&o);
    CHECK(status == QSF_OK || status == QSF_ERR_FORMAT);
    return status == QSF_OK;
}

static void check_edit(const qsf_tensor *t, const unsigned char *table, size_t at, uint16_t value,
                       bool want)
{
    unsigned char *const copy = malloc((size_t)t->data_bytes); /* exactly: ASan sees more */
    memcpy(copy, table, (size_t)t->data_bytes);
    qsf_store_u16(copy + at, value);
    if (!CHECK_EQ(is_good(t, copy), want))
        printf("    at %zu: %u\n", at, value);
    free(copy);
}

static void check_rules(const qsf_tensor *t, const unsigned char *table)
{
    const size_t entries = 4 * ((t->n_rows + 15) / 16 + 1);
    const size_t last = (size_t)t->data_bytes - 4;
    CHECK(is_good(t, table));
    check_edit(t, table, 0, 1, false);
    check_edit(t, table, 4, 0xFFFF, false);
    check_edit(t, table, 6, 0xFFFF, false);
    check_edit(t, table, entries - 8, (uint16_t)(t->n_entries + 1), false);
    check_edit(t, table, entries - 4, (uint16_t)(t->n_entries - 1), false);
    check_edit(t, table, entries - 4, (uint16_t)(t->n_entries + 1), false);
    check_edit(t, table, entries, 0, false);
    check_edit(t, table, entries, 1, true);
    check_edit(t, table, entries, 0xFFFF, false);
    check_edit(t, table, entries + 2, 0x7BFF, true);
    check_edit(t, table, entries + 2, 0x7C00, false);
    check_edit(t, table, entries + 2, 0xFC00, false);
    check_edit(t, table, entries + 2, 0x7C01, false);
    check_edit(t, table, last + 2, 0xFFFF, false);
    /* The last tile row has 8 rows: a step to row 8 or more of it, or to its last weight. */
    uint32_t end = 0;
    for (size_t at = entries + 4 * (size_t)qsf_load_u32(table + entries - 8); at < last; at += 4)
        end += qsf_load_u16(table + at);
    const uint32_t last_weight = 16 * (t->n_cols - 1) + (t->n_rows - 1) % 16;
    check_edit(t, table, last, (uint16_t)(last_weight + 1 - end), true);
    check_edit(t, table, last, (uint16_t)(last_weight + 2 - end), false);
    check_edit(t, table, last, (uint16_t)(16 * t->n_cols + 1 - end), false);
}

/* Any two bytes: refused, or found inside the table and the matrix. */
static void check_noise(const qsf_tensor *t, const unsigned char *table)
{
    uint32_t n_good = 0;
    for (uint32_t i = 0; i < 4000; i++) {
        unsigned char *const copy = malloc((size_t)t->data_bytes);
        memcpy(copy, table, (size_t)t->data_bytes);
        const uint32_t bits = (i + 1) * 2654435761U;
        copy[(bits >> 8) % t->data_bytes] ^= (unsigned char)(1U << (bits & 7));
        copy[(bits >> 16) % t->data_bytes] = (unsigned char)(bits >> 4);
        n_good += is_good(t, copy);
        free(copy);
    }
    CHECK(n_good > 0 && n_good < 4000);
}

/* ---- with the products ---- */

typedef struct run {
    qsf_ops *ops;
    const qsf_acts *x;
    const qsf_reader *reader;
} run;

static float y[3][N_TOKENS * Y_STRIDE];
static float expected[3][N_TOKENS * Y_STRIDE];

static const unsigned char *in_file(const tiny_file *plain, const qsf_tensor *t)
{
    return plain->unit + t->data_off;
}

/* The raw bytes of a unit, whether it is compressed or not. */
static void load_unit(const qsf_reader *r, qsf_stream *stream, uint32_t unit_idx, tiny_file *plain)
{
    const qsf_unit *const u = &r->units[unit_idx];
    CHECK_OK(qsf_stream_begin_unit(stream, unit_idx));
    for (uint64_t off = 0; off < u->raw_bytes;) {
        const uint64_t left = u->raw_bytes - off;
        const size_t cap = qsf_stream_range_bytes(stream, unit_idx, off);
        const size_t n = left < cap ? (size_t)left : cap;
        const unsigned char *bytes = NULL;
        if (!CHECK_OK(qsf_stream_acquire(stream, off, n, &bytes)))
            return;
        memcpy(plain->unit + off, bytes, n);
        off += n;
    }
    CHECK_OK(qsf_stream_end_unit(stream));
}

static void expect(const run *r, const tiny_file *plain, const qsf_tensor *w,
                   const qsf_tensor *outliers, size_t i)
{
    float padded[N_TOKENS * Y_STRIDE];
    const size_t n_tile_rows = (w->n_rows + 15) / 16;
    r->ops->kernels->matmul[QSF_DTYPE_F16](in_file(plain, w), n_tile_rows, r->x, padded, Y_STRIDE);
    for (size_t t = 0; t < N_TOKENS; t++)
        for (size_t row = 0; row < Y_STRIDE; row++)
            expected[i][t * Y_STRIDE + row] = row < w->n_rows ? padded[t * Y_STRIDE + row] : -7.0F;
    for (size_t t = 0; t < N_TOKENS; t++) /* a NaN would hide what is added to it */
        CHECK(isfinite(expected[i][t * Y_STRIDE + w->n_rows - 1]));
    if (outliers != NULL)
        add_naively(in_file(plain, outliers), w->n_rows, expected[i], Y_STRIDE);
    for (size_t k = 0; k < N_TOKENS * Y_STRIDE; k++)
        y[i][k] = -7.0F;
}

static void run_unit(const run *r, uint32_t unit_idx, const tiny_file *plain)
{
    const uint32_t kind = unit_idx == 1 ? QSF_TENSOR_Q : QSF_TENSOR_FFN_GATE;
    const size_t n = unit_idx == 1 ? 3 : 2;
    qsf_linear linears[3];
    size_t n_used = 0;
    CHECK_OK(qsf_stream_begin_unit(r->ops->stream, unit_idx));
    for (uint32_t i = 0; i < n; i++) {
        const qsf_tensor *const w = qsf_reader_tensor(r->reader, unit_idx, kind + i);
        const qsf_tensor *const outliers =
            qsf_reader_tensor(r->reader, unit_idx, kind + i + QSF_TENSOR_Q_OUTLIERS);
        expect(r, plain, w, outliers, i);
        linears[i] = (qsf_linear){w, NULL, y[i], Y_STRIDE, 1, NULL, NULL, {0}};
        CHECK_OK(qsf_ops_load_outliers(r->ops, outliers, &n_used, &linears[i].outliers));
        CHECK_EQ(linears[i].outliers.bytes != NULL, outliers != NULL);
    }
    if (unit_idx == 1)
        CHECK_OK(qsf_linear_run(r->ops, linears, 3, r->x));
    else
        CHECK_OK(qsf_linear_run_pair(r->ops, &linears[0], &linears[1], r->x));
    CHECK_OK(qsf_stream_end_unit(r->ops->stream));
    for (size_t i = 0; i < n; i++)
        CHECK_BYTES(y[i], expected[i], sizeof y[i]);
}

/* A table that changed after it was loaded, as if it had been hostile: an error, no crash. */
static void run_malformed(const run *r)
{
    const qsf_tensor *const w = qsf_reader_tensor(r->reader, 1, QSF_TENSOR_Q);
    const qsf_tensor *const t = qsf_reader_tensor(r->reader, 1, QSF_TENSOR_Q_OUTLIERS);
    unsigned char table[1024];
    size_t n_used = 0;
    qsf_outliers o;
    CHECK_OK(qsf_stream_begin_unit(r->ops->stream, 1));
    if (!CHECK_OK(qsf_ops_load_outliers(r->ops, t, &n_used, &o)) ||
        !CHECK(t->data_bytes <= sizeof table))
        return;
    memcpy(table, o.bytes, (size_t)t->data_bytes);
    qsf_store_u32(table + 8, 0xFFFFFFFF); /* where tile row 2 begins */
    const qsf_linear linear = {w, NULL, y[0], Y_STRIDE, 1, NULL, NULL, {t, table}};
    CHECK_STATUS(qsf_linear_run(r->ops, &linear, 1, r->x), QSF_ERR_FORMAT);
    CHECK_CONTAINS(qsf_error_detail(), "unit 1: the outliers of tensor type 29 in tile row 1");
    qsf_stream_abandon(r->ops->stream);
}

static void run_all(qsf_stream *stream, const qsf_reader *reader, const tiny_file *const *plain,
                    uint32_t n_threads)
{
    static float tails[3][N_TOKENS * QSF_TILE_ROWS];
    static unsigned char tables[4096];
    const qsf_config config = {.outliers_bytes = sizeof tables};
    qsf_scratch scratch = {.tails = {tails[0], tails[1], tails[2]}, .outliers = tables};
    qsf_kernels kernels;
    qsf_pool *pool;
    void *const block = check_alloc(64, qsf_pool_bytes(n_threads));
    memset(block, 0, qsf_pool_bytes(n_threads));
    CHECK_OK(qsf_pool_init(block, n_threads, false, &pool));
    qsf_kernels_init(&kernels, QSF_ISA_SCALAR);
    qsf_ops o = {.config = &config,
                 .kernels = &kernels,
                 .pool = pool,
                 .stream = stream,
                 .scratch = &scratch,
                 .n_tokens = N_TOKENS};
    const qsf_acts x = {.n_tokens = N_TOKENS, .n_blocks = X_STRIDE / QSF_BLOCK, .f32 = acts};
    const run r = {&o, &x, reader};
    qsf_stream_begin_pass(stream, true, NULL, NULL);
    run_unit(&r, 1, plain[0]);
    run_unit(&r, 2, plain[1]);
    qsf_stream_begin_pass(stream, true, NULL, NULL);
    run_malformed(&r);
    qsf_pool_destroy(pool);
    check_free(block);
}

/* Every window from a tile row to the whole, then everything resident. */
static void check_windows(void)
{
    static tiny_file units[2];
    const tiny_file *const plain[2] = {&units[0], &units[1]};
    qsf_ledger ledger;
    qsf_reader reader;
    qsf_ledger_init(&ledger, UINT64_C(64) << 20);
    if (!CHECK_OK(qsf_reader_open(&reader, &ledger, path, -1)))
        return;
    for (size_t extra_bytes = 0; extra_bytes <= 40960; extra_bytes += 4096) {
        bool is_resident[TINY_LAYERS + 2];
        pass_stream pass;
        for (size_t i = 0; i < TINY_LAYERS + 2; i++)
            is_resident[i] = extra_bytes == 40960;
        if (!CHECK_OK(pass_open(&pass, &reader, &ledger, is_resident, extra_bytes)))
            continue;
        qsf_stream_begin_pass(&pass.stream, true, NULL, NULL);
        load_unit(&reader, &pass.stream, 1, &units[0]);
        load_unit(&reader, &pass.stream, 2, &units[1]);
        for (uint32_t n_threads = 1; n_threads <= 3; n_threads++)
            run_all(&pass.stream, &reader, plain, n_threads);
        pass_close(&pass);
    }
    const qsf_tensor *const t = qsf_reader_tensor(&reader, 1, QSF_TENSOR_Q_OUTLIERS);
    check_rules(t, in_file(&units[0], t));
    check_noise(t, in_file(&units[0], t));
    qsf_reader_close(&reader);
    CHECK_EQ_U64(ledger.held_bytes, 0);
}

/* Verifying takes the table for a moment; without memory it says so, and holds nothing. */
static void check_verify(void)
{
    static unsigned char buffer[65536];
    qsf_ledger ledger;
    qsf_reader reader;
    qsf_ledger_init(&ledger, UINT64_C(64) << 20);
    if (!CHECK_OK(qsf_reader_open(&reader, &ledger, path, -1)))
        return;
    CHECK_OK(qsf_reader_verify(&reader, buffer, sizeof buffer));
    const uint64_t held_bytes = ledger.held_bytes;
    for (int64_t n_grants = 0;; n_grants++) {
        ledger.grants_until_fault = n_grants;
        const qsf_status status = qsf_reader_verify(&reader, buffer, sizeof buffer);
        CHECK_EQ_U64(ledger.held_bytes, held_bytes);
        if (status == QSF_OK && CHECK(n_grants > 4))
            break;
        if (!CHECK_EQ(status, QSF_ERR_NOMEM))
            break;
    }
    qsf_reader_close(&reader);
}

int main(void)
{
    for (uint32_t i = 0; i < N_TOKENS * X_STRIDE; i++)
        acts[i] = i % X_STRIDE < N_COLS ? noise(i) : 0.0F;
    for (int isa = QSF_ISA_SCALAR; isa < QSF_ISA_COUNT; isa++)
        if (qsf_isa_has((qsf_isa)isa))
            check_kernel((qsf_isa)isa);
    if (build()) {
        check_windows();
        check_verify();
    }
    remove(path);
    return check_report("check_outliers");
}
