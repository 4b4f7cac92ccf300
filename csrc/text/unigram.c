/* unigram.c - finds the best path to each place from the beginning on, then follows it back from
 * the end. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/encode.h"

#include <string.h>

#include "base/status.h"
#include "text/utf8.h"

#define NOWHERE UINT32_MAX

typedef struct place {
    double score;   /* score of the best path to here */
    uint32_t begin; /* begin of its last token; NOWHERE if no token ends here */
    uint32_t id;
} place;

static double load_f64(const unsigned char *p)
{
    const uint64_t bits = qsf_load_u64(p);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void offer(place *p, double score, size_t begin, uint32_t id)
{
    if (p->begin == NOWHERE || score > p->score)
        *p = (place){score, (uint32_t)begin, id};
}

/* Tries all tokens that begin at `begin`, which must be reachable. */
static void offer_tokens(const qsf_vocabulary *v, qsf_bytes piece, size_t begin, place *places)
{
    const double score = places[begin].score;
    const size_t n_char = qsf_utf8_length(piece.p[begin]);
    bool has_single = false;
    uint32_t node = 0;
    for (size_t i = begin; i < piece.n; i++) {
        node = qsf_tree_child(v->nodes, node, piece.p[i]);
        if (node == 0)
            break;
        const uint32_t id = qsf_load_u32(v->nodes + (size_t)node * 12 + 8);
        if (id == QSF_TOKEN_NONE)
            continue;
        offer(&places[i + 1], load_f64(v->scores + (size_t)id * 8) + score, begin, id);
        has_single |= i + 1 - begin == n_char;
    }
    if (!has_single)
        offer(&places[begin + n_char], v->unk_score + score, begin, v->unk_id);
}

/* Emits a text that is no token: its bytes, or the unknown token. */
static void put_unknown(const qsf_vocabulary *v, qsf_bytes text, qsf_sink *out)
{
    bool has_bytes = (v->flags & QSF_TEXT_BYTE_FALLBACK) != 0;
    for (size_t i = 0; i < text.n && has_bytes; i++)
        has_bytes = qsf_load_u32(v->byte_ids + (size_t)text.p[i] * 4) != QSF_TOKEN_NONE;
    if (!has_bytes)
        qsf_sink_put(out, v->unk_id);
    for (size_t i = 0; i < text.n && has_bytes; i++)
        qsf_sink_put(out, qsf_load_u32(v->byte_ids + (size_t)text.p[i] * 4));
}

static void put_path(const qsf_vocabulary *v, qsf_bytes piece, const place *places,
                     const uint32_t *ends, size_t n_ends, qsf_sink *out)
{
    for (size_t i = n_ends; i-- > 0;) {
        const place *const p = &places[ends[i]];
        size_t end = ends[i];
        if (p->id == v->unk_id && (v->flags & QSF_TEXT_FUSE_UNK) != 0)
            for (; i > 0 && places[ends[i - 1]].id == v->unk_id; i--)
                end = ends[i - 1];
        const qsf_bytes text = {piece.p + p->begin, end - p->begin};
        const uint32_t id = p->id == v->unk_id ? qsf_vocabulary_find(v, text) : p->id;
        if (id != QSF_TOKEN_NONE)
            qsf_sink_put(out, id);
        else
            put_unknown(v, text, out);
    }
}

qsf_status qsf_unigram_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes piece, qsf_sink *out)
{
    if (v->unk_id == QSF_TOKEN_NONE || piece.n >= UINT32_MAX / 2)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED,
                        "a unigram vocabulary without an unknown token, or a piece of %zu bytes",
                        piece.n);
    QSF_TRY(qsf_work_reserve(w, QSF_WORK_UNITS, (piece.n + 1) * sizeof(place)));
    QSF_TRY(qsf_work_reserve(w, QSF_WORK_HEAP, (piece.n + 1) * sizeof(uint32_t)));
    place *const places = w->blocks[QSF_WORK_UNITS];
    for (size_t i = 0; i <= piece.n; i++)
        places[i] = (place){0.0, NOWHERE, 0};
    for (size_t i = 0; i < piece.n; i += qsf_utf8_length(piece.p[i]))
        offer_tokens(v, piece, i, places);
    uint32_t *const ends = w->blocks[QSF_WORK_HEAP];
    size_t n_ends = 0;
    for (size_t end = piece.n; end != 0; end = places[end].begin)
        ends[n_ends++] = (uint32_t)end;
    put_path(v, piece, places, ends, n_ends, out);
    return QSF_OK;
}
