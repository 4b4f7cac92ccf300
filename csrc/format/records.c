/* records.c - finds sections and tensors, and reads a section. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "format/records.h"

#include <inttypes.h>
#include <string.h>

#include "base/status.h"
#include "checksum/crc32.h"

void qsf_section_name(const char tag[4], char name[5])
{
    for (int i = 0; i < 4; i++)
        name[i] = tag[i] >= ' ' && tag[i] <= '~' ? tag[i] : '?';
    name[4] = '\0';
}

const qsf_section *qsf_reader_section(const qsf_reader *r, const char *tag)
{
    for (uint32_t i = 0; i < r->n_sections; i++)
        if (memcmp(r->sections[i].tag, tag, 4) == 0)
            return &r->sections[i];
    return NULL;
}

qsf_status qsf_reader_read_section(qsf_reader *r, const qsf_section *s, void *dst)
{
    QSF_TRY(qsf_file_read_at(&r->file, s->off, dst, (size_t)s->n_bytes));
    const uint32_t crc32 = qsf_crc32(0, dst, (size_t)s->n_bytes);
    if (crc32 == s->crc32)
        return QSF_OK;
    char name[5];
    qsf_section_name(s->tag, name);
    return QSF_FAIL(
        DAMAGED, "section %s (%" PRIu64 " bytes at %" PRIu64 "): checksum is %08x, stored is %08x",
        name, s->n_bytes, s->off, crc32, s->crc32);
}

qsf_status qsf_reader_keep_section(qsf_reader *r, const char *tag, qsf_table *out)
{
    const qsf_section *const s = qsf_reader_section(r, tag);
    if (s == NULL)
        return QSF_OK;
    QSF_TRY(qsf_ledger_take(r->ledger, QSF_USE_TABLES, s->n_bytes, tag, &out->bytes));
    out->n_bytes = (size_t)s->n_bytes;
    return qsf_reader_read_section(r, s, out->bytes);
}

const qsf_tensor *qsf_reader_tensor(const qsf_reader *r, uint32_t unit_idx, uint32_t type)
{
    if (unit_idx >= r->n_units)
        return NULL;
    const qsf_unit *const u = &r->units[unit_idx];
    for (uint32_t i = 0; i < u->n_tensors; i++) {
        const qsf_tensor *const t = &r->tensors[u->first_tensor + i];
        if (t->type == type && t->index == 0)
            return t;
    }
    return NULL;
}
