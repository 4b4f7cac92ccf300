/* check_stream.c - the same bytes whatever is resident, compressed or small; damage is found. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "format/records.h"
#include "stream/unit_source.h"
#include "stream/stream.h"
#include "system.h"
#include "tiny_file.h"
#include "unit_pass.h"

static const char path[] = "check_stream.qsf";
static tiny_file file;

static uint64_t read_bytes(const pass_file *o)
{
    qsf_stats stats = {0};
    qsf_stream_report(&o->pass.stream, &stats);
    return stats.read_bytes;
}

static void build(uint8_t first, uint8_t second, bool is_tied)
{
    tiny_build(&file, &(tiny_options){{first, second}, is_tied, false});
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
}

/* What the weights are, computed from the uncompressed file by its table alone. */
static uint32_t digest_of_file(bool is_tied)
{
    build(QSF_COMPRESSION_NONE, QSF_COMPRESSION_NONE, is_tied);
    pass_file o;
    if (!CHECK_OK(pass_open_file(&o, path, 0xFF, 0)))
        return 0;
    uint32_t crc = 0;
    const qsf_reader *const r = &o.reader;
    for (uint32_t u = 0; u < r->n_stream_units; u++) {
        uint32_t of_unit = 0;
        for (uint32_t i = 0; i < r->units[u].n_tensors; i++) {
            const qsf_tensor *const t = &r->tensors[r->units[u].first_tensor + i];
            of_unit = qsf_crc32(of_unit, file.bytes + r->units[u].off + t->data_off,
                                (size_t)t->data_bytes);
        }
        crc = qsf_crc32(crc, &of_unit, sizeof of_unit);
    }
    const uint32_t of_bands =
        qsf_crc32(0, file.bytes + r->units[0].off + 64, (size_t)r->tensors[0].data_bytes);
    crc = qsf_crc32(crc, &of_bands, sizeof of_bands);
    CHECK_EQ_U64(pass_close_file(&o), 0);
    return crc;
}

static void check_same_bytes(void)
{
    static const size_t extras[] = {0, 1, 63, 64, 1000, 4096, 100000};
    for (uint8_t c = 0; c < QSF_COMPRESSION_COUNT * QSF_COMPRESSION_COUNT; c++) {
        const bool is_tied = c % 3 == 0;
        const uint32_t want = digest_of_file(is_tied);
        build(c % QSF_COMPRESSION_COUNT, c / QSF_COMPRESSION_COUNT, is_tied);
        for (unsigned bits = 0; bits < 16; bits++) {
            const size_t extra_bytes = extras[(bits + c) % COUNT_OF(extras)];
            pass_file o;
            if (!CHECK_OK(pass_open_file(&o, path, bits, extra_bytes)))
                continue;
            for (size_t max_rows = 1; max_rows <= 3; max_rows++) {
                const uint64_t n_acquired = o.ledger.n_acquired;
                uint32_t have = 0;
                CHECK_OK(pass_all(&o.pass.stream, max_rows, &have));
                CHECK_EQ_U64(have, want);
                CHECK_EQ_U64(o.ledger.n_acquired, n_acquired);
            }
            if (bits == 0)
                CHECK(read_bytes(&o) >= 3 * o.reader.units[1].stored_bytes);
            if (bits == 15)
                CHECK_EQ_U64(read_bytes(&o), 0);
            CHECK_EQ_U64(pass_close_file(&o), 0);
        }
    }
}

/* init takes what the sizes say, and no more at any time. */
static void check_sizes(uint8_t c, unsigned bits)
{
    const bool is_resident[TINY_LAYERS + 2] = {bits & 1, bits & 2, bits & 4, bits & 8};
    const bool streams = (bits & 14) != 14; /* unit 0 is not tied: only its bands are read */
    const bool decodes = c != QSF_COMPRESSION_NONE && (bits & 6) != 6;
    pass_file o;
    if (!CHECK_OK(pass_open_file(&o, path, bits, 0)))
        return;
    const qsf_reader *const r = &o.reader;
    qsf_stream_sizes sizes;
    qsf_stream_least(r, is_resident, &sizes);
    CHECK((sizes.ring_bytes != 0) == streams && (sizes.load_bytes != 0) == (bits >= 14));
    uint64_t planned = r->tables_bytes + sizes.band_bytes + qsf_stream_table_bytes(r) +
                       qsf_stream_buffer_bytes(r, &sizes, sizes.ring_bytes);
    for (uint32_t i = 0; i < r->n_stream_units; i++)
        planned += is_resident[i] ? r->units[i].raw_bytes : 0;
    CHECK_EQ_U64(o.ledger.held_bytes, planned);
    CHECK((o.pass.stream.ring != NULL) == streams);
    CHECK((o.pass.stream.decode_buffer != NULL) == decodes);
    pass_close(&o.pass);
    o.ledger.ceiling_bytes = planned + sizes.load_bytes;
    CHECK_OK(pass_open(&o.pass, &o.reader, &o.ledger, is_resident, 0));
    pass_close(&o.pass);
    o.ledger.ceiling_bytes--;
    CHECK_STATUS(pass_open(&o.pass, &o.reader, &o.ledger, is_resident, 0), QSF_ERR_NOMEM);
    o.ledger.ceiling_bytes = PASS_CEILING_BYTES;
    const qsf_stream_options narrow = {
        .is_resident = is_resident,
        .ring_bytes = sizes.ring_bytes - QSF_IO_ALIGN,
    };
    if (streams)
        CHECK_STATUS(qsf_stream_init(&o.pass.stream, &o.reader, &o.ledger, &narrow), QSF_ERR_ARG);
    qsf_reader_close(&o.reader);
    CHECK_EQ_U64(o.ledger.held_bytes, 0);
}

static void check_all_sizes(void)
{
    for (uint8_t c = 0; c < QSF_COMPRESSION_COUNT; c++) {
        build(c, c, false);
        for (unsigned bits = 0; bits < 16; bits++)
            check_sizes(c, bits);
    }
}

/* A block that does not decode is found before its unit's checksum. */
static bool is_refused(qsf_status status)
{
    return status == QSF_ERR_DAMAGED || status == QSF_ERR_FORMAT;
}

/* A flipped byte of a layer is found when a resident one is loaded, and at the latest by
 * end_unit when it is streamed; the other units still pass. */
static void check_damage(void)
{
    for (uint8_t c = 0; c < QSF_COMPRESSION_COUNT; c++) {
        build(c, c, false);
        const unsigned char *const entry = repair_unit(file.bytes, file.n_bytes, 1);
        const uint64_t off = qsf_load_u64(entry);
        const uint32_t n_bytes = (uint32_t)qsf_load_u64(entry + 8);
        for (uint32_t at = 0; at < n_bytes; at += 29) {
            file.bytes[off + at] ^= 0x10;
            CHECK(tiny_write(path, file.bytes, file.n_bytes));
            pass_file o;
            uint32_t digest = 0;
            if (CHECK_OK(pass_open_file(&o, path, 0, 0))) {
                CHECK(is_refused(pass_unit(&o.pass.stream, 1, 1, &digest)));
                CHECK_OK(pass_unit(&o.pass.stream, 2, 1, &digest));
                CHECK(is_refused(pass_unit(&o.pass.stream, 1, 2, &digest)));
                CHECK_EQ_U64(pass_close_file(&o), 0);
            }
            CHECK(is_refused(pass_open_file(&o, path, 2, 0)));
            CHECK_EQ_U64(o.ledger.held_bytes, 0);
            file.bytes[off + at] ^= 0x10;
        }
    }
}

/* A ZSTD block is one frame that says its size, whatever else libzstd would decode. */
static void check_frames(void)
{
    unsigned char raw[500];
    unsigned char have[500];
    static unsigned char frames[3][1000]; /* one, two, and one that does not say its size */
    const size_t workspace_bytes = qsf_codec_workspace_bytes(QSF_COMPRESSION_ZSTD);
    void *const workspace = check_alloc(64, workspace_bytes);
    ZSTD_CCtx *const context = ZSTD_createCCtx();
    memset(raw, 7, sizeof raw);
    if (!CHECK(workspace != NULL && context != NULL))
        return;
    const size_t n = ZSTD_compressCCtx(context, frames[0], sizeof frames[0], raw, 300, 3);
    memcpy(frames[1], frames[0], n);
    const size_t n_second = ZSTD_compressCCtx(context, frames[1] + n, 1000 - n, raw, 200, 3);
    ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
    const size_t n_unsized = ZSTD_compress2(context, frames[2], sizeof frames[2], raw, 300);
    const struct {
        size_t frame;
        size_t n_stored;
        size_t n_raw;
        qsf_status want;
    } cases[] = {
        {0, n, 300, QSF_OK},
        {0, n + 1, 300, QSF_ERR_FORMAT},
        {0, n, 299, QSF_ERR_FORMAT},
        {0, n, 301, QSF_ERR_FORMAT},
        {1, n + n_second, 500, QSF_ERR_FORMAT},
        {2, n_unsized, 300, QSF_ERR_FORMAT},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        if (CHECK_STATUS(qsf_codec_decode(QSF_COMPRESSION_ZSTD, workspace, workspace_bytes,
                                          frames[cases[i].frame], cases[i].n_stored, have,
                                          cases[i].n_raw),
                         cases[i].want) &&
            i == 0)
            CHECK_BYTES(have, raw, 300);
    ZSTD_freeCCtx(context);
    check_free(workspace);
}

/* Changes a byte of the file that is open. */
static void put_byte(size_t at, unsigned char byte)
{
    FILE *const f = fopen(path, "r+b");
    CHECK(f != NULL && fseek(f, (long)at, SEEK_SET) == 0 && fputc(byte, f) == byte);
    CHECK(f != NULL && fclose(f) == 0);
}

static void check_bands(void)
{
    build(QSF_COMPRESSION_NONE, QSF_COMPRESSION_NONE, true);
    const unsigned char *const embd = repair_unit(file.bytes, file.n_bytes, 0);
    const size_t first = (size_t)qsf_load_u64(embd) + 64;
    file.bytes[first + 1056 + 500] ^= 1;
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    pass_file o;
    const unsigned char *band = NULL;
    CHECK_STATUS(pass_open_file(&o, path, 1, 0), QSF_ERR_DAMAGED);
    if (!CHECK_OK(pass_open_file(&o, path, 0, 0)))
        return;
    const qsf_tensor *const table = &o.pass.stream.reader->tensors[0];
    CHECK_OK(qsf_stream_table_band(&o.pass.stream, table, 0, &band));
    CHECK_BYTES(band, file.bytes + first, 1056);
    put_byte(first, file.bytes[first] ^ 1);
    CHECK_OK(qsf_stream_table_band(&o.pass.stream, table, 0, &band)); /* the last band is kept */
    CHECK_BYTES(band, file.bytes + first, 1056);
    put_byte(first, file.bytes[first]);
    CHECK_STATUS(qsf_stream_table_band(&o.pass.stream, table, 1, &band), QSF_ERR_DAMAGED);
    CHECK_STATUS(qsf_stream_table_band(&o.pass.stream, table, 1, &band), QSF_ERR_DAMAGED);
    CHECK_OK(qsf_stream_table_band(&o.pass.stream, table, 2, &band));
    CHECK_BYTES(band, file.bytes + first + 2112, 1056);
    CHECK_STATUS(qsf_stream_table_band(&o.pass.stream, table, 3, &band), QSF_ERR_ARG);
    CHECK_EQ_U64(pass_close_file(&o), 0);
}

/* Broken rules of the caller are answered, and a unit can be begun again after them. */
static void check_misuse(void)
{
    for (uint8_t c = 0; c < QSF_COMPRESSION_COUNT; c++) {
        pass_file o;
        build(c, c, false);
        if (!CHECK_OK(pass_open_file(&o, path, 4, 0)))
            return;
        qsf_stream *const s = &o.pass.stream;
        const uint64_t raw_bytes = o.reader.units[1].raw_bytes;
        const size_t most_bytes = qsf_stream_range_bytes(s, 1, 64);
        /* A ring gives more where more has been read by then. */
        const size_t many_bytes = c == QSF_COMPRESSION_NONE ? (size_t)raw_bytes : most_bytes + 1;
        const struct {
            uint64_t off;
            size_t n_bytes;
        } wrong[] = {{raw_bytes, 1}, {UINT64_MAX, 2}, {64, many_bytes}, {0, 64}};
        const unsigned char *data = NULL;
        uint32_t digest = 0;
        CHECK_EQ_U64(qsf_stream_range_bytes(s, 2, 0), SIZE_MAX);
        CHECK_STATUS(qsf_stream_acquire(s, 0, 1, &data), QSF_ERR_ARG);
        CHECK_STATUS(qsf_stream_end_unit(s), QSF_ERR_ARG);
        CHECK_STATUS(qsf_stream_begin_unit(s, TINY_LAYERS + 2), QSF_ERR_ARG);
        for (size_t i = 0; i < COUNT_OF(wrong); i++) {
            CHECK_OK(qsf_stream_begin_unit(s, 1));
            if (i == 3) { /* goes back */
                CHECK_STATUS(qsf_stream_begin_unit(s, 2), QSF_ERR_ARG);
                CHECK_OK(qsf_stream_acquire(s, raw_bytes - 64, 64, &data));
            }
            CHECK_STATUS(qsf_stream_acquire(s, wrong[i].off, wrong[i].n_bytes, &data), QSF_ERR_ARG);
            CHECK_STATUS(qsf_stream_end_unit(s), QSF_ERR_ARG);
        }
        CHECK_OK(qsf_stream_begin_unit(s, 1));
        CHECK_OK(qsf_stream_acquire(s, 63, most_bytes < 1000 ? most_bytes : 1000, &data));
        qsf_stream_abandon(s);
        CHECK_OK(pass_unit(s, 1, 1, &digest));
        CHECK_OK(pass_unit(s, 2, 1, &digest));
        CHECK_EQ_U64(pass_close_file(&o), 0);
    }
}

/* Overlapping and touching spans of every start give the unit's bytes. */
static void check_spans(void)
{
    for (uint8_t c = 0; c < QSF_COMPRESSION_COUNT; c++) {
        build(c, c, false);
        pass_file resident;
        pass_file streamed;
        if (!CHECK_OK(pass_open_file(&resident, path, 15, 0)) ||
            !CHECK_OK(pass_open_file(&streamed, path, 0, 0)))
            return;
        const size_t raw_bytes = (size_t)resident.reader.units[1].raw_bytes;
        for (size_t step = 1; step <= 997; step += 83) {
            CHECK_OK(qsf_stream_begin_unit(&streamed.pass.stream, 1));
            for (size_t off = 0; off < raw_bytes; off += step) {
                const size_t n_bytes = qsf_stream_range_bytes(&streamed.pass.stream, 1, off) / 2;
                const size_t n = raw_bytes - off < n_bytes ? raw_bytes - off : n_bytes;
                const unsigned char *data = NULL;
                if (!CHECK_OK(qsf_stream_acquire(&streamed.pass.stream, off, n, &data)))
                    break;
                CHECK_BYTES(data, resident.pass.stream.resident[1] + off, n);
            }
            CHECK_OK(qsf_stream_end_unit(&streamed.pass.stream));
        }
        CHECK_EQ_U64(pass_close_file(&streamed), 0);
        CHECK_EQ_U64(pass_close_file(&resident), 0);
    }
}

/* The whole life of a stream with the N-th read or the N-th grant failing. */
static qsf_status live(pass_file *o, unsigned bits, int64_t reads, int64_t grants)
{
    uint32_t digest = 0;
    QSF_TRY(pass_open_failing(o, path, bits, 0, reads, grants));
    const qsf_status status = pass_all(&o->pass.stream, 1, &digest);
    if (status != QSF_OK) { /* the fault is over: the failed unit can be begun again */
        o->reader.file.reads_until_fault = -1;
        qsf_stream_abandon(&o->pass.stream);
        CHECK_OK(pass_all(&o->pass.stream, 1, &digest));
    }
    (void)pass_close_file(o);
    return status;
}

static void check_faults(void)
{
    for (uint8_t c = 0; c < 8; c++) {
        build(c % 4, (uint8_t)((c + 1) % 4), c % 2 == 0);
        const unsigned bits = c < 4 ? 0 : 6;
        for (int kind = 0; kind < 2; kind++) {
            int64_t n_ok = 0;
            pass_file o;
            for (;; n_ok++) {
                const qsf_status status =
                    live(&o, bits, kind == 0 ? n_ok : -1, kind == 0 ? -1 : n_ok);
                CHECK_EQ_U64(o.ledger.held_bytes, 0);
                if (status == QSF_OK || n_ok > 1000)
                    break;
                CHECK_STATUS(status, kind == 0 ? QSF_ERR_IO : QSF_ERR_NOMEM);
            }
            CHECK(n_ok > 5 && n_ok < 1000); /* a run that injected nothing proves nothing */
        }
    }
}

int main(void)
{
    check_same_bytes();
    check_all_sizes();
    check_damage();
    check_frames();
    check_bands();
    check_misuse();
    check_spans();
    check_faults();
    remove(path);
    return check_report("check_stream");
}
