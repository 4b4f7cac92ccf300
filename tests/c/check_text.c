/* check_text.c - vocabularies against damage, long texts, wrong arguments and several threads; the
 * tables of Unicode. Ids and texts: tests/python/text/test_engine_tokenizer.py, and streamed ones
 * tests/fuzz/fuzz_text.c, of whose seeds these are the vocabularies.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/bytes.h"
#include "check.h"
#include "checksum/crc32.h"
#include "platform/thread.h"
#include "text/encode.h"
#include "text/unicode.h"
#include "text/utf8.h"

#define MANY_BYTES 1000000U
#define MOST_SEED_BYTES (1U << 17)

static const char *const families[] = {"gpt2", "qwen2",  "o200k",   "deepseek",
                                       "nfkc", "llama2", "mistral", "unigram_first"};

static uint32_t ids[MANY_BYTES + 64];
static char text[3 * MANY_BYTES + 64];

/* The section of a seed: the size of a text, the text, the section. */
static const unsigned char *read_section(const char *name, size_t *n_section)
{
    static unsigned char seed[MOST_SEED_BYTES];
    char path[1024];
    snprintf(path, sizeof path, QSF_GOLDEN_DIR "/../fuzz/corpus/text/%s", name);
    FILE *const in = fopen(path, "rb");
    if (!CHECK(in != NULL))
        exit(check_report("check_text"));
    const size_t n_bytes = fread(seed, 1, sizeof seed, in);
    fclose(in);
    const size_t n_before = 4 + (size_t)qsf_load_u32(seed);
    CHECK(n_bytes > n_before && n_bytes < sizeof seed);
    *n_section = n_bytes - n_before;
    return seed + n_before;
}

static qsf_text *open_family(const char *name)
{
    qsf_text *t = NULL;
    size_t n_section = 0;
    const unsigned char *const section = read_section(name, &n_section);
    CHECK_OK(qsf_text_create(section, n_section, &t));
    return t;
}

/* A megabyte of one letter: in linear time, within the bound on memory. */
static void check_long(void)
{
    static char many[MANY_BYTES];
    memset(many, 'a', sizeof many);
    for (size_t f = 0; f < COUNT_OF(families); f++) {
        qsf_text *const t = open_family(families[f]);
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
    qsf_text *const t = open_family("gpt2");
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
    static unsigned char copy[MOST_SEED_BYTES];
    static const uint32_t values[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
    const char text_in[] = "a <|im_start|> word 1234 'S \xC3\xA9\n\n\xE4\xB8\xAD";
    const size_t stride = (size_t)check_stride();
    for (size_t f = 0; f < COUNT_OF(families); f++) {
        size_t n_section = 0;
        const unsigned char *const section = read_section(families[f], &n_section);
        for (size_t at = 0; at + 4 <= n_section; at += 20 * stride) {
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
        for (size_t n = 0; n < n_section; n += 97 * stride) {
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
    check_long();
    check_arguments();
    check_damage();
    check_utf8();
    return check_report("check_text");
}
