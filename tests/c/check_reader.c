/* check_reader.c - a good file is read as it was meant, every change of it is refused. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "check.h"
#include "format/records.h"
#include "stream/stream.h"
#include "stream/contents.h"
#include "tiny_file.h"
#include "unit_pass.h"

#define CEILING_BYTES PASS_CEILING_BYTES
#define BUFFER_BYTES (64U << 10)
#define MAX_EDITS 3

static const char path[] = "check_reader.qsf";
static const tiny_options plain = {{0, 0}, false, false};
static tiny_file file;
static unsigned char buffer[BUFFER_BYTES];

/* Opens and verifies what is stored at `path`; *is_open says whether open succeeded. */
static qsf_status open_and_verify(bool *is_open)
{
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, CEILING_BYTES);
    qsf_reader r;
    qsf_status status = qsf_reader_open(&r, &ledger, path, -1);
    *is_open = status == QSF_OK;
    if (*is_open) {
        CHECK_EQ_U64(ledger.held_bytes, r.tables_bytes);
        status = qsf_reader_verify(&r, buffer, sizeof buffer);
        qsf_reader_close(&r);
    }
    CHECK_EQ_U64(ledger.held_bytes, 0);
    qsf_reader_close(&r); /* closed twice is fine */
    return status;
}

/* A checksum of everything that can be read from the file at `path`. */
static uint32_t digest_all(void)
{
    pass_file f;
    uint32_t digest = 0;
    if (!CHECK_OK(pass_open_file(&f, path, 0, 0)))
        return 0;
    CHECK_OK(pass_all(&f.pass.stream, 1, &digest));
    for (uint32_t i = 0; i < f.reader.n_sections; i++) {
        CHECK_OK(qsf_reader_read_section(&f.reader, &f.reader.sections[i], buffer));
        digest = qsf_crc32(digest, buffer, (size_t)f.reader.sections[i].n_bytes);
    }
    digest = qsf_crc32(digest, &f.reader.header, sizeof f.reader.header);
    (void)pass_close_file(&f);
    return digest;
}

static void check_good(void)
{
    for (unsigned i = 0; i < 64; i++) {
        const tiny_options o = {{(uint8_t)(i % 4), (uint8_t)(i / 4 % 4)}, i / 16 % 2, i / 32};
        bool is_open = false;
        tiny_build(&file, &o);
        CHECK(tiny_write(path, file.bytes, file.n_bytes));
        CHECK_OK(open_and_verify(&is_open));
    }
    tiny_build(&file, &plain);
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, CEILING_BYTES);
    qsf_reader r;
    if (!CHECK_OK(qsf_reader_open(&r, &ledger, path, -1)))
        return;
    CHECK_NEAR(r.arch.rope_high_freq_factor, 4.0, 0.0); /* defaults */
    CHECK_EQ(r.arch.rope_original_tokens, 8192);
    CHECK_EQ(r.n_units, 4);
    CHECK_EQ(r.n_tensors, 11);
    CHECK_EQ(r.n_bands, 3);
    CHECK_EQ(r.units[1].dtype, QSF_DTYPE_MIXED);
    CHECK_NEAR(r.units[1].importance, 0.5, 0.0);
    CHECK(qsf_reader_section(&r, "WPOS") == NULL);
    const qsf_tensor *const k = qsf_reader_tensor(&r, 1, QSF_TENSOR_K);
    if (CHECK(k != NULL)) {
        CHECK_EQ_U64(k->data_off, 64 + 256 + 64 + 2112 + 64);
        CHECK_EQ_U64(k->data_bytes, 2 * 576);
        CHECK_EQ(k->n_cols, 100);
    }
    CHECK(qsf_reader_tensor(&r, 1, QSF_TENSOR_V) == NULL);
    CHECK(qsf_reader_tensor(&r, 9, QSF_TENSOR_V) == NULL);
    CHECK_STATUS(qsf_reader_verify(&r, buffer, 100), QSF_ERR_ARG);
    qsf_reader_close(&r);
    CHECK_STATUS(qsf_reader_open(&r, &ledger, "no such file.qsf", -1), QSF_ERR_IO);
    CHECK_EQ_U64(ledger.held_bytes, 0);
}

/* What a byte of the file is, from the bytes of the file themselves. */
typedef enum place {
    PLACE_PADDING,
    PLACE_TABLE,  /* read by open */
    PLACE_WEIGHTS /* or another section that open does not read */
} place;

static void mark(place *places, uint64_t off, uint64_t n_bytes, place what)
{
    for (uint64_t i = 0; i < n_bytes; i++)
        places[off + i] = what;
}

static void mark_places(place *places)
{
    const uint64_t directory_off = qsf_load_u64(file.bytes + 100);
    mark(places, 0, file.n_bytes, PLACE_PADDING);
    mark(places, 0, QSF_HEADER_BYTES, PLACE_TABLE);
    mark(places, directory_off, file.n_sections * 32, PLACE_TABLE);
    for (uint32_t i = 0; i < file.n_sections; i++) {
        const unsigned char *const entry = file.bytes + directory_off + (size_t)i * 32;
        const bool is_read_later = memcmp(entry, "META", 4) == 0;
        mark(places, qsf_load_u64(entry + 8), qsf_load_u64(entry + 16),
             is_read_later ? PLACE_WEIGHTS : PLACE_TABLE);
    }
    for (uint32_t i = 0; i < file.n_units; i++) {
        const unsigned char *const entry = repair_unit(file.bytes, file.n_bytes, i);
        mark(places, qsf_load_u64(entry), qsf_load_u64(entry + 8), PLACE_WEIGHTS);
    }
}

/* Magic, version and the header's size are judged before its checksum: a file of another version
 * may have another. */
static qsf_status single_byte_status(size_t at)
{
    if (at >= 4 && at < 8)
        return QSF_ERR_UNSUPPORTED;
    return at < 12 ? QSF_ERR_FORMAT : QSF_ERR_DAMAGED;
}

/* Bytes of the file, changed alone: those of tables in each bit, and some to all other values;
 * every fifth of the rest in two bits. */
static void check_single_bytes(const tiny_options *o, bool all_values, size_t stride)
{
    static place places[TINY_CAP_BYTES];
    uint32_t n_of_place[3] = {0, 0, 0};
    tiny_build(&file, o);
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    const uint32_t digest = digest_all();
    mark_places(places);
    FILE *const f = fopen(path, "r+b");
    if (!CHECK(f != NULL))
        return;
    for (size_t at = 0; at < file.n_bytes; at++) {
        n_of_place[places[at]]++;
        if (at % (places[at] == PLACE_TABLE ? stride : 5 * stride) != 0)
            continue;
        for (int change = 1; change < 256; change++) {
            const bool is_one_bit = (change & (change - 1)) == 0;
            if (places[at] == PLACE_TABLE ? (!all_values || at % 7 != 0) && !is_one_bit
                                          : change != 1 && change != 128)
                continue;
            bool is_open = false;
            fseek(f, (long)at, SEEK_SET);
            fputc(file.bytes[at] ^ change, f);
            fflush(f);
            const qsf_status status = open_and_verify(&is_open);
            const qsf_status want = single_byte_status(at);
            /* Padding has no checksum; a block that does not decode is found before its unit's. */
            const bool has_checksum =
                places[at] == PLACE_TABLE ||
                (places[at] == PLACE_WEIGHTS && o->compression[0] == QSF_COMPRESSION_NONE);
            if (!CHECK((status == want || (!has_checksum && status == QSF_ERR_FORMAT)) &&
                       is_open == (places[at] != PLACE_TABLE)))
                printf("byte %zu changed by %d: %s, %s\n", at, change, qsf_status_name(status),
                       qsf_error_detail());
            if (places[at] == PLACE_PADDING && change == 1)
                CHECK_EQ_U64(digest_all(), digest);
        }
        fseek(f, (long)at, SEEK_SET);
        fputc(file.bytes[at], f);
        fflush(f);
    }
    fclose(f);
    CHECK(n_of_place[PLACE_PADDING] > 1000 && n_of_place[PLACE_TABLE] > 500 &&
          n_of_place[PLACE_WEIGHTS] > 5000);
    CHECK_EQ_U64(digest_all(), digest);
}

/* Lengths that are not the right one. The file becomes shorter and shorter: to write it anew each
 * time would wait for the disk. */
static void check_truncations(size_t stride)
{
    tiny_build(&file, &plain);
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    for (size_t n = file.n_bytes + 9; n-- > 0;) {
        bool is_open = false;
        if (n == file.n_bytes || n % (n < 4096 ? stride : 7 * stride) != 0)
            continue;
        CHECK(truncate(path, (off_t)n) == 0); /* what is longer ends in zeros */
        CHECK_STATUS(open_and_verify(&is_open),
                     n < QSF_HEADER_BYTES ? QSF_ERR_FORMAT : QSF_ERR_DAMAGED);
        CHECK(!is_open);
    }
}

/* One number of the file changed; checksums are repaired afterwards. */
typedef struct edit {
    const char *where; /* "head", "dir:TAG" (its entry), a tag or "unit:N" (its contents) */
    uint32_t off;
    uint32_t n_bytes; /* of the number; 0: no edit */
    uint64_t value;
} edit;

typedef enum answer {
    FINE, /* opens and verifies */
    F,    /* open: QSF_ERR_FORMAT */
    V     /* opens; verify: QSF_ERR_FORMAT */
} answer;

typedef struct rule {
    edit edits[MAX_EDITS];
    answer want;
    const char *text; /* part of the error */
} rule;

#define UNIT(idx, off) (uint32_t)((idx)*48 + (off))   /* in UNIT */
#define TENSOR(idx, off) (uint32_t)((idx)*32 + (off)) /* in TENS */
#define TAG(a, b, c, d) \
    ((uint64_t)(a) | (uint64_t)(b) << 8 | (uint64_t)(c) << 16 | (uint64_t)(d) << 24)

/* Each kind of arithmetic once: what wraps, what ends one behind its limit, what overlaps. All
 * rules of docs/format.md, each broken: tests/python/make/attacks.py. */
/* clang-format off */
static const rule plain_rules[] = {
    {{{"head", 16, 4, 4096}}, F, "1 embeddings, 2 layers, 1 final units, allowed: 1, 4096, 1"},
    {{{"head", 100, 8, 0xFFFFFFFFFFFFFFF8}}, F, "directory: 160 bytes"},
    {{{"dir:META", 8, 8, 0xFFFFFFFFFFFFFFF8}}, F, "section META: 18 bytes at"},
    {{{"dir:META", 8, 8, 287}}, F, "directory (160 bytes at 128) overlaps META"},
    {{{"dir:META", 8, 8, 23311}}, F, "are not inside the file"},
    {{{"dir:META", 0, 4, TAG(0xFF, 'a', 0, 1)}}, FINE, ""},
    {{{"dir:TENS", 16, 8, 10 * 32}}, F, "the 2 tensors of unit 3 take"},
    {{{"UNIT", UNIT(0, 8), 8, 8192 - 4096 + 1}, {"UNIT", UNIT(0, 16), 8, 8192 - 4096 + 1}}, F,
     "embedding (4097 bytes at 4096) overlaps layer"},
    {{{"UNIT", UNIT(1, 0), 8, 0xFFFFFFFFFFFFF000}}, F, "unit 1: 3712 bytes at"},
    {{{"UNIT", UNIT(1, 8), 8, 0xFFFFFFFFFFFFFFFF}}, F, "18446744073709551615 bytes at"},
    {{{"TENS", TENSOR(2, 8), 4, 1U << 24}, {"TENS", TENSOR(2, 12), 4, 1U << 24}}, F,
     "entry 2 has 290271069732864 bytes"},
    {{{"TENS", TENSOR(2, 24), 8, 0xFFFFFFFFFFFFFFC0}}, F, "entry 2 has 2112 bytes at"},
    {{{"TENS", TENSOR(5, 18), 2, 5}, {"TENS", TENSOR(2, 18), 2, 5}, {"TENS", TENSOR(5, 4), 4, 0}},
     V, "unit 1: the tensor header"},
    {{{"unit:0", 64 + 3168 + 31, 1, 128}}, V, "unit 0: the padding at 3232"},
    {{{"ARCH", 28, 4, 0xFFFFFFFF}}, F, "has 4294967295 values"},
    {{{"dir:ARCH", 16, 8, 26}}, F, "2 bytes left at 24"},
    {{{"ARCH", 12, 4, 32}}, FINE, ""},
};

/* LZ4 and ZSTD: a block's stored size is at 0 of the layer, its raw size at 4. Their places in
 * the file do not depend on the weights. */
static const rule packed_rules[] = {
    {{{"head", 8192, 4, 0xFFFFFFFF}}, V, "unit 1: a block of 4294967295 stored"},
    {{{"head", 8196, 4, 0xFFFFFFFF}}, V, "stored and 4294967295 raw"},
    {{{"head", 8196, 4, 1001}}, V, "damaged LZ4 block"},
    {{{"head", 12288 + 8, 4, 0xFFFFFFFF}}, V, "damaged ZSTD block"},
    {{{"UNIT", UNIT(1, 8), 8, 1}}, V, "unit 1: 1 stored bytes left for 3712 raw ones"},
    {{{"UNIT", UNIT(1, 8), 8, 4000}}, V, "stored bytes are left after its last block"},
};
/* clang-format on */

static void apply(const edit *e)
{
    unsigned char *base = file.bytes;
    if (e->n_bytes == 0)
        return;
    if (strncmp(e->where, "dir:", 4) == 0)
        base = repair_find(file.bytes, file.n_bytes, e->where + 4);
    else if (strncmp(e->where, "unit:", 5) == 0)
        base += qsf_load_u64(repair_unit(file.bytes, file.n_bytes, (uint32_t)(e->where[5] - '0')));
    else if (strcmp(e->where, "head") != 0)
        base += qsf_load_u64(repair_find(file.bytes, file.n_bytes, e->where) + 8);
    for (uint32_t i = 0; i < e->n_bytes; i++)
        base[e->off + i] = (unsigned char)(e->value >> 8 * i & 0xFF);
}

static void check_rules(const tiny_options *o, const rule *rules, size_t n_rules)
{
    for (size_t i = 0; i < n_rules; i++) {
        bool is_open = false;
        tiny_build(&file, o);
        /* From the last to the first, so that an edit of a tag can come after others of it. */
        for (size_t e = MAX_EDITS; e-- > 0;)
            apply(&rules[i].edits[e]);
        repair_checksums(file.bytes, file.n_bytes);
        CHECK(tiny_write(path, file.bytes, file.n_bytes));
        const answer want = rules[i].want;
        const qsf_status status = want == FINE ? QSF_OK : QSF_ERR_FORMAT;
        bool ok = CHECK_STATUS(open_and_verify(&is_open), status);
        ok = CHECK(is_open == (want == FINE || want == V)) && ok;
        ok = (want == FINE || CHECK_CONTAINS(qsf_error_detail(), rules[i].text)) && ok;
        if (!ok)
            printf("rule %zu: %s at %u\n", i, rules[i].edits[0].where, rules[i].edits[0].off);
    }
}

/* What repaired files never have. Tables beyond their limit: tests/python/file/test_attacks.py. */
static void check_unrepaired(void)
{
    for (int i = 0; i < 2; i++) {
        bool is_open = false;
        tiny_build(&file, &plain);
        if (i == 0) { /* two places hold the checksum of UNIT */
            file.bytes[120] ^= 1;
        } else { /* the checksum of a band is verify's to find */
            file.bytes[qsf_load_u64(repair_find(file.bytes, file.n_bytes, "EBND") + 8) + 4] ^= 1;
            repair_sections(file.bytes, file.n_bytes);
        }
        qsf_store_u32(file.bytes + 124, qsf_crc32(0, file.bytes + 100, 24));
        CHECK(tiny_write(path, file.bytes, file.n_bytes));
        CHECK_STATUS(open_and_verify(&is_open), QSF_ERR_DAMAGED);
        CHECK_EQ(is_open, i == 1);
        CHECK_CONTAINS(qsf_error_detail(), i == 0 ? "in the header" : "embedding band 1");
    }
}

/* open and verify with the N-th read or the N-th grant failing. */
static void check_faults(void)
{
    tiny_build(&file, &(tiny_options){{0, 3}, false, true});
    /* A tensor with an index, in the table and in its unit: open needs memory for those. */
    apply(&(edit){"TENS", TENSOR(2, 18), 2, 5});
    apply(&(edit){"head", 8192 + 64 + 256 + 14, 2, 5});
    repair_checksums(file.bytes, file.n_bytes);
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    for (int kind = 0; kind < 2; kind++) {
        qsf_status status = QSF_ERR_ARG;
        int64_t n_ok = 0;
        for (; status != QSF_OK && n_ok < 1000; n_ok++) {
            qsf_ledger ledger;
            qsf_ledger_init(&ledger, CEILING_BYTES);
            ledger.grants_until_fault = kind == 0 ? -1 : n_ok;
            qsf_reader r;
            status = qsf_reader_open(&r, &ledger, path, kind == 0 ? n_ok : -1);
            if (status == QSF_OK)
                status = qsf_reader_verify(&r, buffer, sizeof buffer);
            else
                CHECK_EQ_U64(ledger.held_bytes, 0);
            qsf_reader_close(&r);
            CHECK_EQ_U64(ledger.held_bytes, 0);
            if (status != QSF_OK)
                CHECK_STATUS(status, kind == 0 ? QSF_ERR_IO : QSF_ERR_NOMEM);
        }
        CHECK(n_ok > 5 && n_ok < 1000); /* a run that injected nothing proves nothing */
    }
}

int main(void)
{
    const size_t stride = check_stride();
    check_good();
    check_rules(&plain, plain_rules, COUNT_OF(plain_rules));
    check_rules(&(tiny_options){{1, 3}, false, false}, packed_rules, COUNT_OF(packed_rules));
    check_unrepaired();
    check_faults();
    check_truncations(stride);
    check_single_bytes(&plain, true, stride);
    check_single_bytes(&(tiny_options){{QSF_COMPRESSION_LZ4, QSF_COMPRESSION_ZSTD}, true, false},
                       false, stride);
    remove(path);
    return check_report("check_reader");
}
