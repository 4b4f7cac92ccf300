/* check_outliers.c - hostile sparse outlier tables are refused: any table by the reader's rules,
 * and with right checksums by an engine that has them in memory or streams them. What tables add:
 * kernels/outliers.c and tests/python/api/test_same_bits.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20) /* a model larger than the buffers of streaming */
#define TINY_MODEL_DIM 256
#define TINY_MODEL_FFN 2044 /* the last tile row has 12 rows */

#include "engine_rig.h"
#include "format/records.h"
#include "stream/contents.h"

static char path[64];
static tiny_file file;

static bool is_good(const qsf_tensor *t, const unsigned char *table)
{
    const qsf_outliers o = {t, table};
    const qsf_status status = qsf_outliers_check(&o);
    CHECK(status == QSF_OK || status == QSF_ERR_FORMAT);
    return status == QSF_OK;
}

/* One 16-bit number of a table: from its begin, its first entry or its last one. */
typedef struct edit {
    enum { BEGIN, ENTRIES, LAST } from;
    long off;
    uint32_t value;
    bool is_good;
} edit;

static size_t place_of(const qsf_tensor *t, const edit *e)
{
    const size_t entries = 4 * ((t->n_rows + 15) / 16 + 1);
    const size_t from = e->from == BEGIN     ? 0
                        : e->from == ENTRIES ? entries
                                             : (size_t)t->data_bytes - 4;
    return (size_t)((long)from + e->off);
}

static void check_rules(const qsf_tensor *t, const unsigned char *table)
{
    const size_t entries = 4 * ((t->n_rows + 15) / 16 + 1);
    uint32_t end = 0; /* behind the entry before the last, in positions of the last tile row */
    for (size_t at = entries + 4 * (size_t)qsf_load_u32(table + entries - 8);
         at < t->data_bytes - 4; at += 4)
        end += qsf_load_u16(table + at);
    const uint32_t last_weight = 16 * (t->n_cols - 1) + (t->n_rows - 1) % 16;
    const edit edits[] = {
        {BEGIN, 0, 1, false},
        {BEGIN, 4, 0xFFFF, false},
        {BEGIN, 6, 0xFFFF, false},
        {ENTRIES, -8, t->n_entries + 1, false},
        {ENTRIES, -4, t->n_entries - 1, false},
        {ENTRIES, -4, t->n_entries + 1, false},
        {ENTRIES, 0, 0, false},
        {ENTRIES, 0, 1, true},
        {ENTRIES, 0, 0xFFFF, false},
        {ENTRIES, 2, 0x7BFF, true},
        {ENTRIES, 2, 0x7C00, false}, /* infinities and NaN */
        {ENTRIES, 2, 0xFC00, false},
        {ENTRIES, 2, 0x7C01, false},
        {LAST, 2, 0xFFFF, false},
        {LAST, 0, last_weight + 1 - end, true},
        {LAST, 0, last_weight + 2 - end, false}, /* a row that is not there */
        {LAST, 0, 16 * t->n_cols + 1 - end, false},
    };
    CHECK(is_good(t, table));
    for (size_t i = 0; i < COUNT_OF(edits); i++) {
        unsigned char *const copy = malloc((size_t)t->data_bytes); /* exactly: ASan sees more */
        memcpy(copy, table, (size_t)t->data_bytes);
        qsf_store_u16(copy + place_of(t, &edits[i]), (uint16_t)edits[i].value);
        if (!CHECK_EQ(is_good(t, copy), edits[i].is_good))
            printf("    edit %zu\n", i);
        free(copy);
    }
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

/* A number of the table of the last layer is wrong, whose checksums are right: no logits. */
static void check_engine(size_t table_off, const qsf_tensor *t, bool is_streamed)
{
    static const edit edits[] = {
        {BEGIN, 0, 1, false},   {BEGIN, 6, 0xFFFF, false},   {ENTRIES, -4, 0, false},
        {ENTRIES, 0, 0, false}, {ENTRIES, 0, 0xFFFF, false}, {ENTRIES, 2, 0x7C00, false},
    };
    for (size_t i = 0; i < COUNT_OF(edits); i++) {
        unsigned char *const at = file.bytes + table_off + place_of(t, &edits[i]);
        const uint16_t good = qsf_load_u16(at);
        const qsf_options opt = rig_options(2, 0);
        qsf_store_u16(at, (uint16_t)edits[i].value);
        qsf_model *const m = !rig_write(path, &file) ? NULL
                             : is_streamed           ? rig_open_streamed(path, opt)
                                                     : rig_open(path, &opt);
        qsf_session *s = NULL;
        qsf_store_u16(at, good);
        if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
            continue;
        CHECK_STATUS(qsf_session_step(s, 1), QSF_ERR_FORMAT);
        CHECK_CONTAINS(qsf_error_detail(), "the outliers of tensor type 29");
        qsf_session_destroy(s);
        qsf_model_close(m);
    }
}

int main(void)
{
    qsf_ledger ledger;
    qsf_reader r;
    check_path(path, sizeof path, "check_outliers");
    qsf_ledger_init(&ledger, UINT64_MAX);
    if (!rig_build(path, &file,
                   &(tiny_model){.n_layers = 2, .dtype = QSF_DTYPE_F16, .has_outliers = true}) ||
        !CHECK_OK(qsf_reader_open(&r, &ledger, path, -1)))
        return check_report("check_outliers");
    const qsf_tensor *const of_up = qsf_reader_tensor(&r, 2, QSF_TENSOR_FFN_UP_OUTLIERS);
    const qsf_tensor of_q = *qsf_reader_tensor(&r, 2, QSF_TENSOR_Q_OUTLIERS);
    const size_t unit_off = (size_t)r.units[2].off;
    check_rules(of_up, file.bytes + unit_off + of_up->data_off);
    check_noise(of_up, file.bytes + unit_off + of_up->data_off);
    qsf_reader_close(&r);
    CHECK_EQ_U64(ledger.held_bytes, 0);
    check_engine(unit_off + (size_t)of_q.data_off, &of_q, false);
    check_engine(unit_off + (size_t)of_q.data_off, &of_q, true);
    remove(path);
    return check_report("check_outliers");
}
