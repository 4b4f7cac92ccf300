/* check_text.c - vocabularies against the library's ids, and against damage. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "checksum/crc32.h"
#include "golden_text.h"
#include "platform/thread.h"
#include "text/encode.h"
#include "text/unicode.h"
#include "text/utf8.h"

#define MANY_BYTES 1000000U

static const char *const families[] = {"gpt2", "qwen2",  "o200k",   "deepseek",
                                       "nfkc", "llama2", "mistral", "unigram-first"};
#define N_FAMILIES COUNT_OF(families)

static golden_text golden;
static golden_case one;
static uint32_t ids[MANY_BYTES + 64];
static char text[3 * MANY_BYTES + 64];

static qsf_text *open_family(const char *name, uint32_t *n_cases)
{
    qsf_text *t = NULL;
    uint32_t n_section = 0;
    const unsigned char *const section = golden_open(&golden, name, &n_section, n_cases);
    CHECK(section != NULL);
    if (section != NULL)
        CHECK_OK(qsf_text_create(section, n_section, &t));
    return t;
}

/* Whole, and token by token: the pieces are the whole, and no character is cut. */
static void check_decoding(const qsf_text *t, const golden_case *c)
{
    const uint32_t flags = QSF_DETOKENIZE_SPECIAL | QSF_DETOKENIZE_START;
    size_t n_bytes = 0;
    CHECK_OK(qsf_detokenize(t, c->ids, c->n_ids, flags, text, sizeof text, &n_bytes));
    CHECK(n_bytes == c->n_decoded && memcmp(text, c->decoded, n_bytes) == 0);
    qsf_text_decoder d;
    qsf_decoder_init(t, flags, &d);
    char piece[4096];
    size_t at = 0;
    for (uint32_t i = 0; i < c->n_ids; i++) {
        size_t n = 0;
        CHECK_OK(qsf_decoder_push(t, &d, c->ids[i], piece, sizeof piece, &n));
        CHECK(qsf_utf8_valid_bytes((const unsigned char *)piece, n) == n);
        CHECK(at + n <= n_bytes && memcmp(piece, text + at, n) == 0);
        at += n;
    }
    at += qsf_decoder_flush(&d, piece);
    CHECK_EQ(at, n_bytes);
    /* A buffer that is too small is said to be, and nothing is written behind it. */
    if (c->n_decoded > 1) {
        CHECK_OK(qsf_detokenize(t, c->ids, c->n_ids, flags, text, 1, &n_bytes));
        CHECK(n_bytes > 1);
    }
}

static void check_golden(void)
{
    for (size_t f = 0; f < N_FAMILIES; f++) {
        uint32_t n_cases = 0;
        qsf_text *const t = open_family(families[f], &n_cases);
        CHECK(n_cases >= 10);
        for (uint32_t i = 0; i < n_cases; i++) {
            golden_next(&golden, &one);
            size_t n = 0;
            CHECK_STATUS(qsf_tokenize(t, one.text, one.n_text, one.flags, ids, one.n_ids, &n),
                         QSF_OK);
            CHECK_EQ(n, one.n_ids);
            CHECK(memcmp(ids, one.ids, one.n_ids * sizeof *ids) == 0);
            if (one.n_ids > 0) { /* counted the same where there is no room */
                CHECK_OK(qsf_tokenize(t, one.text, one.n_text, one.flags, NULL, 0, &n));
                CHECK_EQ(n, one.n_ids);
            }
            check_decoding(t, &one);
        }
        qsf_text_close(t);
    }
}

/* A megabyte of one letter: in linear time, within the bound on memory. */
static void check_long(void)
{
    static char many[MANY_BYTES];
    memset(many, 'a', sizeof many);
    for (size_t f = 0; f < N_FAMILIES; f++) {
        uint32_t n_cases = 0;
        qsf_text *const t = open_family(families[f], &n_cases);
        size_t n = 0;
        size_t n_bytes = 0;
        CHECK_OK(qsf_tokenize(t, many, sizeof many, 0, ids, MANY_BYTES + 64, &n));
        CHECK_OK(qsf_detokenize(t, ids, n, QSF_DETOKENIZE_START, text, sizeof text, &n_bytes));
        CHECK(n_bytes == sizeof many && memcmp(text, many, n_bytes) == 0);
        qsf_text_close(t);
    }
}

static void check_arguments(void)
{
    static const struct {
        const char *text;
        size_t n_bytes;
        uint32_t flags;
    } wrong[] = {{"a", 1, 8}, {"a\xFF", 2, 0}, {"\xED\xA0\x80", 3, 0}};
    uint32_t n_cases = 0;
    qsf_text *const t = open_family("gpt2", &n_cases);
    size_t n = 0;
    qsf_text *none = NULL;
    for (size_t i = 0; i < COUNT_OF(wrong); i++)
        CHECK_STATUS(qsf_tokenize(t, wrong[i].text, wrong[i].n_bytes, wrong[i].flags, ids, 1, &n),
                     QSF_ERR_ARG);
    CHECK_STATUS(qsf_text_create("x", 1, &none), QSF_ERR_FORMAT);
    qsf_text_decoder d;
    qsf_decoder_init(t, 0, &d);
    CHECK_STATUS(qsf_decoder_push(t, &d, 70, text, 2, &n), QSF_ERR_ARG);
    CHECK_OK(qsf_decoder_push(t, &d, 0xFFFFFFFF, text, 64, &n));
    CHECK_EQ(n, 0);
    CHECK_EQ(qsf_token_find(t, "no such token", 13, 0), QSF_TOKEN_NONE);
    CHECK_EQ(qsf_token_text(t, 0xFFFFFFFF, text, 9), 0);
    qsf_text_close(t);
    qsf_text_close(NULL);
}

/* Any single damaged number is refused, or does no harm. */
static void check_damage(void)
{
    static unsigned char copy[GOLDEN_MAX_BYTES];
    static const uint32_t values[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    const char text_in[] = "a <|im_start|> word 1234 'S \xC3\xA9\n\n\xE4\xB8\xAD";
    const size_t stride = (size_t)check_stride();
    for (size_t f = 0; f < N_FAMILIES; f++) {
        uint32_t n_section = 0;
        uint32_t n_cases = 0;
        const unsigned char *const section =
            golden_open(&golden, families[f], &n_section, &n_cases);
        for (size_t at = 0; section != NULL && at + 4 <= n_section; at += 20 * stride) {
            memcpy(copy, section, n_section);
            qsf_store_u32(copy + at, values[at / 4 % 5]);
            qsf_text *t = NULL;
            size_t n = 0;
            const qsf_status status = qsf_text_create(copy, n_section, &t);
            CHECK(status == QSF_OK || status == QSF_ERR_FORMAT || status == QSF_ERR_UNSUPPORTED);
            CHECK((t != NULL) == (status == QSF_OK));
            if (t != NULL) {
                (void)qsf_tokenize(t, text_in, sizeof text_in - 1, 3, ids, 64, &n);
                (void)qsf_detokenize(t, ids, n < 64 ? n : 64, 2, text, sizeof text, &n);
            }
            qsf_text_close(t);
        }
        for (size_t n = 0; section != NULL && n < n_section; n += 97 * stride) {
            qsf_text *t = NULL;
            CHECK_STATUS(qsf_text_create(section, n, &t), QSF_ERR_FORMAT);
        }
    }
}

static void check_utf8(void)
{
    size_t n = 0;
    static const struct {
        unsigned char bytes[3];
        qsf_utf8_kind kind;
    } cases[] = {{{0xF0, 0x9F, 0x98}, QSF_UTF8_CUT},
                 {{0xE2, 0x28, 0xA1}, QSF_UTF8_BROKEN},
                 {{0xED, 0xA0, 0x80}, QSF_UTF8_BROKEN}}; /* a surrogate */
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        CHECK_EQ(qsf_utf8_look(cases[i].bytes, 3, &n), cases[i].kind);
        CHECK_EQ(n, cases[i].kind == QSF_UTF8_CUT ? 3 : 1);
    }
    for (uint32_t c = 0; c < QSF_UNICODE_POINTS; c++) {
        if (c >= 0xD800 && c < 0xE000)
            continue;
        unsigned char bytes[4];
        size_t n_used = 0;
        const size_t n_bytes = qsf_utf8_store(bytes, c);
        const bool is_same = qsf_utf8_load(bytes, &n_used) == c && n_used == n_bytes &&
                             qsf_utf8_look(bytes, n_bytes, &n_used) == QSF_UTF8_CHAR &&
                             n_used == n_bytes;
        if (!is_same)
            CHECK_EQ(c, 0xFFFFFFFF);
    }
}

/* Checksums of the decoded tables. */
static void check_tables(void)
{
    qsf_unicode_load();
    CHECK_EQ_U64(qsf_crc32(0, &qsf_unicode_words, sizeof qsf_unicode_words), 0xF4B87E2E);
    CHECK_EQ_U64(qsf_crc32(0, &qsf_unicode_classes, sizeof qsf_unicode_classes), 0xBCB7F311);
    uint32_t sum = 0;
    for (size_t i = 0; i < QSF_UNICODE_DECOMPOSITIONS; i++) {
        const qsf_decomposition *const d = &qsf_unicode_decompositions[i];
        const uint32_t head[3] = {d->c, d->n, d->is_compatible};
        sum = qsf_crc32(sum, head, sizeof head);
        sum = qsf_crc32(sum, &qsf_unicode_pool[d->first], d->n * sizeof(uint32_t));
    }
    CHECK_EQ_U64(sum, 0x2B5B60B3);
    sum = qsf_crc32(0, qsf_unicode_compositions, sizeof qsf_unicode_compositions);
    CHECK_EQ_U64(sum, 0x0E49E76A);
}

static void *look_up(void *is_right)
{
    qsf_unicode_load();
    *(bool *)is_right = qsf_unicode_word('7') == QSF_CHAR_WORD && qsf_unicode_class(0x301) == 230;
    return NULL;
}

/* No thread returns before the tables are there, whichever decodes them. */
static void check_loading(void)
{
    bool are_right[4] = {false};
    qsf_thread threads[4];
    for (size_t i = 0; i < 4; i++)
        CHECK_OK(qsf_thread_start(&threads[i], 65536, look_up, &are_right[i]));
    for (size_t i = 0; i < 4; i++) {
        qsf_thread_join(&threads[i]);
        CHECK(are_right[i]);
    }
}

int main(void)
{
    check_loading(); /* first: it decodes */
    check_tables();
    check_golden();
    check_long();
    check_arguments();
    check_damage();
    check_utf8();
    return check_report("check_text");
}
