/* text_open.c - reads a vocabulary from a file, and compares the vocabularies of two files. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model_open.h"

#include <string.h>

#include "base/status.h"
#include "format/records.h"

#define READER_BYTES (UINT64_C(8) << 20) /* the file's own tables, until the section is read */

/* Reads and checks the section TEXT. After a failure *out may be set; close it in any case. */
static qsf_status read_text(qsf_reader *r, qsf_text **out)
{
    const qsf_section *const section = qsf_reader_section(r, "TEXT");
    QSF_FAIL_IF(section == NULL, UNSUPPORTED,
                "the file has no section TEXT: convert the model again, or use the Python package, "
                "which reads its tokenizer.json");
    QSF_TRY(qsf_text_reserve(section->n_bytes, out));
    QSF_TRY(qsf_reader_read_section(r, section, (*out)->section));
    return qsf_text_check(*out);
}

qsf_status qsf_text_open(const char *path, qsf_text **out)
{
    QSF_FAIL_IF(path == NULL || out == NULL, ARG, "qsf_text_open: a pointer is NULL");
    *out = NULL;
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, READER_BYTES);
    qsf_reader r = {.file.handle = -1};
    qsf_status status = qsf_reader_open(&r, &ledger, path, -1);
    if (status == QSF_OK)
        status = read_text(&r, out);
    qsf_reader_close(&r);
    if (status != QSF_OK) {
        qsf_text_close(*out);
        *out = NULL;
    }
    return status;
}

/* ---- two files ---- */

/* Bytes of a token that an error shows. */
#define SHOWN_BYTES 24

/* True if both files have this section, and it is the same. */
static bool has_same_section(const qsf_reader *a, const qsf_reader *b, const char *tag)
{
    const qsf_section *const x = qsf_reader_section(a, tag);
    const qsf_section *const y = qsf_reader_section(b, tag);
    return x != NULL && y != NULL && x->n_bytes == y->n_bytes && x->crc32 == y->crc32;
}

static int shown(qsf_bytes token)
{
    return (int)(token.n < SHOWN_BYTES ? token.n : SHOWN_BYTES);
}

static qsf_status compare(const qsf_vocabulary *model, const qsf_vocabulary *drafter)
{
    const uint32_t n_ids = model->n_ids < drafter->n_ids ? model->n_ids : drafter->n_ids;
    for (uint32_t id = 0; id < n_ids; id++) {
        const qsf_bytes a = qsf_vocabulary_text(model, id);
        const qsf_bytes b = qsf_vocabulary_text(drafter, id);
        QSF_FAIL_IF(a.n != b.n || memcmp(a.p, b.p, a.n) != 0, ARG,
                    "it has another tokenizer: token %u is \"%.*s\" there, and \"%.*s\" in the "
                    "model that it is to guess for",
                    id, shown(b), (const char *)b.p, shown(a), (const char *)a.p);
    }
    return QSF_OK;
}

static qsf_status compare_texts(qsf_reader *model, qsf_reader *drafter)
{
    qsf_text *a = NULL;
    qsf_text *b = NULL;
    qsf_status status = read_text(model, &a);
    if (status == QSF_OK)
        status = read_text(drafter, &b);
    if (status == QSF_OK)
        status = compare(&a->vocabulary, &b->vocabulary);
    qsf_text_close(a);
    qsf_text_close(b);
    return status;
}

qsf_status qsf_drafter_check_tokens(qsf_reader *model, qsf_reader *drafter)
{
    if (has_same_section(model, drafter, "TEXT") || has_same_section(model, drafter, "TOKN"))
        return QSF_OK;
    const bool has_text = qsf_reader_section(model, "TEXT") != NULL;
    if (has_text && qsf_reader_section(drafter, "TEXT") != NULL)
        return compare_texts(model, drafter);
    const bool has_none = !has_text && qsf_reader_section(model, "TOKN") == NULL &&
                          qsf_reader_section(drafter, "TEXT") == NULL &&
                          qsf_reader_section(drafter, "TOKN") == NULL;
    const uint32_t n_here = model->header.n_vocab;
    const uint32_t n_there = drafter->header.n_vocab;
    if (has_none && n_here == n_there)
        return QSF_OK;
    return QSF_FAIL(ARG,
                    "its tokenizer (%u tokens) cannot be compared with that of the model that it "
                    "is to guess for (%u): the sections TOKN differ, and not both files have TEXT",
                    n_there, n_here);
}
