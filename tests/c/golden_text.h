/* golden_text.h - reads tests/golden/text: tools/make_golden_text.py has the form. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_GOLDEN_TEXT_H
#define QSF_TESTS_GOLDEN_TEXT_H

#include <stdio.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "include/qsf.h"

#define GOLDEN_MAX_BYTES (1U << 20)
#define GOLDEN_MAX_IDS 4096

typedef struct golden_text {
    unsigned char bytes[GOLDEN_MAX_BYTES];
    size_t n_bytes;
    size_t at;
} golden_text;

typedef struct golden_case {
    uint32_t flags;
    const char *text;
    uint32_t n_text;
    uint32_t ids[GOLDEN_MAX_IDS];
    uint32_t n_ids;
    const char *decoded;
    uint32_t n_decoded;
} golden_case;

static inline uint32_t golden_number(golden_text *g)
{
    if (g->at + 4 > g->n_bytes)
        return 0;
    g->at += 4;
    return qsf_load_u32(g->bytes + g->at - 4);
}

static inline const char *golden_bytes(golden_text *g, uint32_t *n_bytes)
{
    *n_bytes = golden_number(g);
    if (*n_bytes > g->n_bytes - g->at)
        *n_bytes = 0;
    const char *const p = (const char *)g->bytes + g->at;
    g->at += *n_bytes;
    return p;
}

/* The section, and the number of cases behind it; NULL where the file is not there. */
static inline const unsigned char *golden_open(golden_text *g, const char *name,
                                               uint32_t *n_section, uint32_t *n_cases)
{
    char path[1024];
    snprintf(path, sizeof path, QSF_GOLDEN_DIR "/text/%s.bin", name);
    FILE *const in = fopen(path, "rb");
    if (in == NULL)
        return NULL;
    g->n_bytes = fread(g->bytes, 1, sizeof g->bytes, in);
    g->at = 0;
    fclose(in);
    const unsigned char *const section = (const unsigned char *)golden_bytes(g, n_section);
    *n_cases = golden_number(g);
    return section;
}

static inline void golden_next(golden_text *g, golden_case *c)
{
    c->flags = golden_number(g);
    c->text = golden_bytes(g, &c->n_text);
    c->n_ids = golden_number(g);
    for (uint32_t i = 0; i < c->n_ids && i < GOLDEN_MAX_IDS; i++)
        c->ids[i] = golden_number(g);
    c->decoded = golden_bytes(g, &c->n_decoded);
}

#endif
