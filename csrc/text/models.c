/* models.c - the tokens of one piece: by byte-pair encoding (short pieces by a search for the
 * lowest rank, long ones with a heap), Unigram and WordPiece.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/encode.h"

#include <string.h>

#include "base/status.h"
#include "text/utf8.h"

#define SHORT_BYTES 48
#define GONE UINT32_MAX /* a unit that was merged into the previous one */
#define NOWHERE UINT32_MAX

/* Writes the tokens of a character's bytes; false if one of them has none. */
static bool put_bytes(const qsf_vocabulary *v, qsf_bytes c, uint32_t *ids, size_t *n)
{
    for (size_t i = 0; i < c.n; i++) {
        const uint32_t id = qsf_load_u32(v->byte_ids + (size_t)c.p[i] * 4);
        if (id == QSF_TOKEN_NONE)
            return false;
        ids[*n + i] = id;
    }
    *n += c.n;
    return true;
}

/* Writes the tokens of single units to ids [piece.n]; returns their number. */
static size_t first_units(const qsf_vocabulary *v, qsf_bytes piece, uint32_t *ids)
{
    const bool is_bytes = v->model == QSF_TEXT_BPE_BYTES;
    bool has_unknown = false; /* the last unit was unknown and is not in ids yet */
    size_t n = 0;
    size_t n_unit;
    for (size_t i = 0; i < piece.n; i += n_unit) {
        n_unit = is_bytes ? 1 : qsf_utf8_length(piece.p[i]);
        const qsf_bytes unit = {piece.p + i, n_unit};
        const uint32_t id = n_unit == 1 ? qsf_load_u32(v->unit_ids + (size_t)piece.p[i] * 4)
                                        : qsf_vocabulary_find(v, unit);
        if (id != QSF_TOKEN_NONE) {
            if (has_unknown)
                ids[n++] = v->unk_id;
            has_unknown = false;
            ids[n++] = id;
            continue;
        }
        /* Like HF tokenizers: the unknown token follows the byte-fallback tokens after it. */
        if ((v->flags & QSF_TEXT_BYTE_FALLBACK) != 0 && put_bytes(v, unit, ids, &n))
            continue;
        if (v->unk_id == QSF_TOKEN_NONE)
            continue;
        if (has_unknown && (v->flags & QSF_TEXT_FUSE_UNK) == 0)
            ids[n++] = v->unk_id;
        has_unknown = true;
    }
    if (has_unknown)
        ids[n++] = v->unk_id;
    return n;
}

static void encode_short(const qsf_vocabulary *v, qsf_bytes piece, qsf_sink *out)
{
    uint32_t ids[SHORT_BYTES];
    uint32_t ranks[SHORT_BYTES]; /* rank of the merge of unit i with the next one */
    size_t n = first_units(v, piece, ids);
    for (size_t i = 0; i + 1 < n; i++)
        ranks[i] = qsf_merge_rank(v, ids[i], ids[i + 1]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[best])
                best = i;
        if (ranks[best] == QSF_MERGE_NONE)
            break;
        ids[best] = qsf_merge_result(v, ranks[best]);
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
        if (best + 1 < n) {
            memmove(ranks + best + 1, ranks + best + 2, (n - best - 2) * sizeof *ranks);
            ranks[best] = qsf_merge_rank(v, ids[best], ids[best + 1]);
        }
        if (best > 0)
            ranks[best - 1] = qsf_merge_rank(v, ids[best - 1], ids[best]);
    }
    for (size_t i = 0; i < n; i++)
        qsf_sink_put(out, ids[i]);
}

/* A merge is rank << 32 | unit, so the smallest number is the next merge. Each merge removes one
 * entry and adds at most two: room for 2 n is enough. */
typedef struct heap {
    uint64_t *merges;
    size_t n;
} heap;

static void push(heap *h, uint64_t merge)
{
    size_t at = h->n++;
    for (; at != 0 && h->merges[(at - 1) / 2] > merge; at = (at - 1) / 2)
        h->merges[at] = h->merges[(at - 1) / 2];
    h->merges[at] = merge;
}

static uint64_t pop(heap *h)
{
    const uint64_t first = h->merges[0];
    const uint64_t last = h->merges[--h->n];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < h->n; at = child) {
        child += child + 1 < h->n && h->merges[child + 1] < h->merges[child];
        if (h->merges[child] >= last)
            break;
        h->merges[at] = h->merges[child];
    }
    h->merges[at] = last;
    return first;
}

typedef struct chain {
    uint32_t *ids;
    uint32_t *next;
    uint32_t *before;
} chain;

static void push_pair(const qsf_vocabulary *v, heap *h, const chain *c, uint32_t unit)
{
    const uint32_t rank = qsf_merge_rank(v, c->ids[unit], c->ids[c->next[unit]]);
    if (rank != QSF_MERGE_NONE)
        push(h, (uint64_t)rank << 32 | unit);
}

static void merge_all(const qsf_vocabulary *v, heap *h, const chain *c)
{
    while (h->n != 0) {
        const uint64_t top = pop(h);
        const uint32_t unit = (uint32_t)top;
        if (c->ids[unit] == GONE || c->next[unit] == NOWHERE)
            continue;
        const uint32_t gone = c->next[unit];
        const uint32_t rank = qsf_merge_rank(v, c->ids[unit], c->ids[gone]);
        const uint32_t result = qsf_merge_result(v, (uint32_t)(top >> 32));
        if (rank == QSF_MERGE_NONE || qsf_merge_result(v, rank) != result)
            continue; /* one of the two units has changed since */
        c->ids[unit] = result;
        c->ids[gone] = GONE;
        c->next[unit] = c->next[gone];
        if (c->next[unit] != NOWHERE) {
            c->before[c->next[unit]] = unit;
            push_pair(v, h, c, unit);
        }
        if (c->before[unit] != NOWHERE)
            push_pair(v, h, c, c->before[unit]);
    }
}

static qsf_status encode_long(const qsf_vocabulary *v, qsf_work *w, qsf_bytes piece, qsf_sink *out)
{
    QSF_FAIL_IF(piece.n >= UINT32_MAX / 2, NOMEM, "a piece of %zu bytes is too long to be encoded",
                piece.n);
    QSF_TRY(qsf_work_reserve(w, QSF_WORK_UNITS, piece.n * 3 * sizeof(uint32_t)));
    QSF_TRY(qsf_work_reserve(w, QSF_WORK_HEAP, piece.n * 2 * sizeof(uint64_t)));
    chain c = {.ids = w->blocks[QSF_WORK_UNITS]};
    c.next = c.ids + piece.n;
    c.before = c.next + piece.n;
    const size_t n = first_units(v, piece, c.ids);
    for (size_t i = 0; i < n; i++) {
        c.next[i] = i + 1 < n ? (uint32_t)(i + 1) : NOWHERE;
        c.before[i] = i != 0 ? (uint32_t)(i - 1) : NOWHERE;
    }
    heap h = {w->blocks[QSF_WORK_HEAP], 0};
    for (uint32_t i = 0; i + 1 < n; i++)
        push_pair(v, &h, &c, i);
    merge_all(v, &h, &c);
    for (uint32_t i = 0; i < n; i++)
        if (c.ids[i] != GONE)
            qsf_sink_put(out, c.ids[i]);
    return QSF_OK;
}

qsf_status qsf_bpe_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes piece, qsf_sink *out)
{
    if ((v->flags & QSF_TEXT_IGNORE_MERGES) != 0) {
        const uint32_t id = qsf_vocabulary_find(v, piece);
        if (id != QSF_TOKEN_NONE) {
            qsf_sink_put(out, id);
            return QSF_OK;
        }
    }
    if (piece.n <= SHORT_BYTES) {
        encode_short(v, piece, out);
        return QSF_OK;
    }
    return encode_long(v, w, piece, out);
}

/* ---- Unigram ---- */

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
    QSF_FAIL_IF(v->unk_id == QSF_TOKEN_NONE || piece.n >= UINT32_MAX / 2, UNSUPPORTED,
                "a unigram vocabulary without an unknown token, or a piece of %zu bytes", piece.n);
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

/* ---- WordPiece ---- */

#define MOST_CHARS 100 /* of a word */

static size_t count_chars(qsf_bytes text)
{
    size_t n = 0;
    for (size_t i = 0; i < text.n; i += qsf_utf8_length(text.p[i]))
        n++;
    return n;
}

/* Returns the longest token of at least `least` bytes at the beginning of a text, or
 * QSF_TOKEN_NONE; its end is the beginning of a character. */
static uint32_t find_longest(const qsf_vocabulary *v, qsf_bytes text, size_t least, size_t *n_bytes)
{
    size_t n = text.n < v->max_token_bytes ? text.n : v->max_token_bytes;
    for (; n >= least; n--) {
        if (n < text.n && (text.p[n] & 0xC0) == 0x80)
            continue;
        const uint32_t id = qsf_vocabulary_find(v, (qsf_bytes){text.p, n});
        *n_bytes = n;
        if (id != QSF_TOKEN_NONE)
            return id;
    }
    return QSF_TOKEN_NONE;
}

qsf_status qsf_wordpiece_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes word, qsf_sink *out)
{
    QSF_FAIL_IF(v->unk_id == QSF_TOKEN_NONE, UNSUPPORTED,
                "a WordPiece vocabulary without an unknown token");
    const size_t n_prefix = QSF_WORD_PREFIX_BYTES;
    QSF_TRY(qsf_work_reserve(w, QSF_WORK_HEAP, n_prefix + word.n));
    QSF_TRY(qsf_work_reserve(w, QSF_WORK_UNITS, word.n * sizeof(uint32_t)));
    /* The word after room for a prefix; later prefixes replace what was taken. */
    unsigned char *const bytes = w->blocks[QSF_WORK_HEAP];
    uint32_t *const ids = w->blocks[QSF_WORK_UNITS];
    memcpy(bytes + n_prefix, word.p, word.n);
    size_t n = 0;
    size_t n_bytes = 0;
    bool is_known = count_chars(word) <= MOST_CHARS;
    for (size_t i = 0; i < word.n && is_known;) {
        const size_t n_here = i == 0 ? 0 : n_prefix;
        unsigned char *const at = bytes + n_prefix + i - n_here;
        memcpy(at, QSF_WORD_PREFIX, n_here);
        const qsf_bytes rest = {at, word.n - i + n_here};
        ids[n] = find_longest(v, rest, n_here + 1, &n_bytes);
        is_known = ids[n++] != QSF_TOKEN_NONE;
        i += n_bytes - n_here;
    }
    if (!is_known)
        qsf_sink_put(out, v->unk_id);
    for (size_t i = 0; i < n && is_known; i++)
        qsf_sink_put(out, ids[i]);
    return QSF_OK;
}
