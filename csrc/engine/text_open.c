/* text_open.c - a vocabulary from a file: its section is read, its checksum compared. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/text_open.h"

#include "base/status.h"
#include "format/reader.h"

#define READER_BYTES (UINT64_C(8) << 20) /* the file's own tables, until the section is read */

qsf_status qsf_text_read(qsf_reader *r, qsf_text **out)
{
    const qsf_section *const section = qsf_reader_section(r, "TEXT");
    if (section == NULL)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED,
                        "the file has no section TEXT: convert the model again, or use the Python "
                        "package, which reads its tokenizer.json");
    QSF_TRY(qsf_text_reserve(section->n_bytes, out));
    QSF_TRY(qsf_reader_read_section(r, section, (*out)->section));
    return qsf_text_check(*out);
}

qsf_status qsf_text_open(const char *path, qsf_text **out)
{
    if (path == NULL || out == NULL)
        return QSF_FAIL(QSF_ERR_ARG, "qsf_text_open: a pointer is NULL");
    *out = NULL;
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, READER_BYTES);
    qsf_reader r = {.file.handle = -1};
    qsf_status status = qsf_reader_open(&r, &ledger, path, -1);
    if (status == QSF_OK)
        status = qsf_text_read(&r, out);
    qsf_reader_close(&r);
    if (status != QSF_OK) {
        qsf_text_close(*out);
        *out = NULL;
    }
    return status;
}
