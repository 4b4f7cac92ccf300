/* normalize.c - the normalising steps, one after another, alternating between two blocks. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/encode.h"

#include <string.h>

#include "base/status.h"
#include "text/unicode.h"
#include "text/utf8.h"

#define HANGUL_FIRST 0xAC00U
#define HANGUL_L 0x1100U
#define HANGUL_V 0x1161U
#define HANGUL_T 0x11A7U
#define N_HANGUL_L 19U
#define N_HANGUL_V 21U
#define N_HANGUL_T 28U
#define N_HANGUL (N_HANGUL_L * N_HANGUL_V * N_HANGUL_T)

#define FEW_MARKS 16

typedef struct composer {
    qsf_work *w;
    int block; /* of the result */
    bool is_compatible;
    bool is_decomposed;      /* NFD and NFKD: nothing is composed */
    uint32_t first_unstable; /* lower characters are normalised already unless a mark follows */
    size_t n_out;
    size_t n_run; /* a starter and the marks after it, or marks alone at the beginning */
} composer;

static qsf_status put_bytes(composer *c, const unsigned char *p, size_t n_bytes)
{
    QSF_TRY(qsf_work_reserve(c->w, c->block, c->n_out + n_bytes + 1)); /* never NULL */
    memcpy((unsigned char *)c->w->blocks[c->block] + c->n_out, p, n_bytes);
    c->n_out += n_bytes;
    return QSF_OK;
}

static const qsf_decomposition *find_decomposition(uint32_t c, bool is_compatible)
{
    size_t low = 0;
    size_t high = QSF_UNICODE_DECOMPOSITIONS;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (qsf_unicode_decompositions[middle].c < c)
            low = middle + 1;
        else
            high = middle;
    }
    /* If there are two, the canonical one comes first. */
    const qsf_decomposition *entry = NULL;
    for (; low < QSF_UNICODE_DECOMPOSITIONS && qsf_unicode_decompositions[low].c == c; low++)
        if (is_compatible || !qsf_unicode_decompositions[low].is_compatible)
            entry = &qsf_unicode_decompositions[low];
    return entry;
}

/* Writes to out [QSF_UNICODE_MAX_DECOMPOSED]; returns the number. */
static size_t decompose(uint32_t c, bool is_compatible, uint32_t *out)
{
    if (c - HANGUL_FIRST < N_HANGUL) {
        const uint32_t s = c - HANGUL_FIRST;
        out[0] = HANGUL_L + s / (N_HANGUL_V * N_HANGUL_T);
        out[1] = HANGUL_V + s % (N_HANGUL_V * N_HANGUL_T) / N_HANGUL_T;
        out[2] = HANGUL_T + s % N_HANGUL_T;
        return s % N_HANGUL_T != 0 ? 3 : 2;
    }
    const qsf_decomposition *const d = find_decomposition(c, is_compatible);
    if (d == NULL) {
        out[0] = c;
        return 1;
    }
    for (size_t i = 0; i < d->n; i++)
        out[i] = qsf_unicode_pool[d->first + i];
    return d->n;
}

/* Returns the composition of the two characters, or 0. */
static uint32_t compose(uint32_t first, uint32_t second)
{
    if (first - HANGUL_L < N_HANGUL_L && second - HANGUL_V < N_HANGUL_V)
        return HANGUL_FIRST + ((first - HANGUL_L) * N_HANGUL_V + (second - HANGUL_V)) * N_HANGUL_T;
    if (first - HANGUL_FIRST < N_HANGUL && (first - HANGUL_FIRST) % N_HANGUL_T == 0 &&
        second - HANGUL_T - 1 < N_HANGUL_T - 1)
        return first + (second - HANGUL_T);
    size_t low = 0;
    size_t high = QSF_UNICODE_COMPOSITIONS;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const qsf_composition *const pair = &qsf_unicode_compositions[middle];
        if (pair->first < first || (pair->first == first && pair->second < second))
            low = middle + 1;
        else
            high = middle;
    }
    if (low == QSF_UNICODE_COMPOSITIONS || qsf_unicode_compositions[low].first != first ||
        qsf_unicode_compositions[low].second != second)
        return 0;
    return qsf_unicode_compositions[low].c;
}

/* Sorts marks by class; keeps the order within a class. */
static qsf_status sort_marks(composer *c, size_t begin)
{
    uint32_t *run = c->w->blocks[QSF_WORK_RUN];
    if (c->n_run - begin <= FEW_MARKS) {
        for (size_t i = begin + 1; i < c->n_run; i++) {
            const uint32_t mark = run[i];
            const unsigned class = qsf_unicode_class(mark);
            size_t k = i;
            for (; k > begin && qsf_unicode_class(run[k - 1]) > class; k--)
                run[k] = run[k - 1];
            run[k] = mark;
        }
        return QSF_OK;
    }
    QSF_TRY(qsf_work_reserve(c->w, QSF_WORK_SORT, c->n_run * sizeof *run));
    uint32_t *const sorted = c->w->blocks[QSF_WORK_SORT];
    size_t firsts[257] = {0};
    for (size_t i = begin; i < c->n_run; i++)
        firsts[qsf_unicode_class(run[i]) + 1]++;
    for (size_t i = 1; i < 257; i++)
        firsts[i] += firsts[i - 1];
    for (size_t i = begin; i < c->n_run; i++)
        sorted[firsts[qsf_unicode_class(run[i])]++] = run[i];
    memcpy(run + begin, sorted, (c->n_run - begin) * sizeof *run);
    return QSF_OK;
}

/* Sorts the run's marks and composes them with its starter as far as possible. */
static qsf_status close_run(composer *c)
{
    uint32_t *const run = c->w->blocks[QSF_WORK_RUN];
    if (c->n_run < 2)
        return QSF_OK;
    const bool has_starter = qsf_unicode_class(run[0]) == 0;
    QSF_TRY(sort_marks(c, has_starter));
    if (!has_starter || c->is_decomposed)
        return QSF_OK;
    size_t n_kept = 1;
    unsigned last_class = 0;
    for (size_t i = 1; i < c->n_run; i++) {
        const unsigned class = qsf_unicode_class(run[i]);
        const uint32_t joined = last_class < class ? compose(run[0], run[i]) : 0;
        if (joined != 0) {
            run[0] = joined;
            continue;
        }
        last_class = class;
        run[n_kept++] = run[i];
    }
    c->n_run = n_kept;
    return QSF_OK;
}

static qsf_status put_run(composer *c)
{
    const uint32_t *const run = c->w->blocks[QSF_WORK_RUN];
    for (size_t i = 0; i < c->n_run; i++) {
        unsigned char bytes[4];
        QSF_TRY(put_bytes(c, bytes, qsf_utf8_store(bytes, run[i])));
    }
    c->n_run = 0;
    return QSF_OK;
}

/* A character of a decomposition. */
static qsf_status add_char(composer *c, uint32_t ch)
{
    QSF_TRY(qsf_work_reserve(c->w, QSF_WORK_RUN, (c->n_run + 1) * sizeof ch));
    uint32_t *const run = c->w->blocks[QSF_WORK_RUN];
    if (qsf_unicode_class(ch) == 0) {
        QSF_TRY(close_run(c));
        const bool may_join = c->n_run == 1 && qsf_unicode_class(run[0]) == 0 && !c->is_decomposed;
        const uint32_t joined = may_join ? compose(run[0], ch) : 0;
        if (joined != 0) {
            run[0] = joined;
            return QSF_OK;
        }
        QSF_TRY(put_run(c));
    }
    run[c->n_run++] = ch;
    return QSF_OK;
}

/* True for starters that decomposition leaves unchanged and that do not compose with an earlier
 * starter. */
static bool is_stable(const composer *c, uint32_t ch)
{
    return ch < c->first_unstable || (ch >= 0x3400 && ch < 0xA000);
}

/* Offset of the first character that is not stable. */
static size_t stable_bytes(const composer *c, qsf_bytes in)
{
    size_t at = 0;
    while (at < in.n) {
        size_t n_bytes;
        if (!is_stable(c, qsf_utf8_load(in.p + at, &n_bytes)))
            break;
        at += n_bytes;
    }
    return at;
}

static qsf_status normalize_composed(composer *c, qsf_bytes in, qsf_bytes *out)
{
    *out = in;
    size_t at = 0;
    if (stable_bytes(c, in) == in.n)
        return QSF_OK;
    while (at < in.n) {
        size_t n_stable = stable_bytes(c, (qsf_bytes){in.p + at, in.n - at});
        if (at + n_stable < in.n) /* the last one may compose with the next character */
            while (n_stable != 0 && (in.p[at + --n_stable] & 0xC0) == 0x80)
                continue;
        if (n_stable != 0) {
            QSF_TRY(close_run(c));
            QSF_TRY(put_run(c));
            QSF_TRY(put_bytes(c, in.p + at, n_stable));
            at += n_stable;
            continue;
        }
        uint32_t chars[QSF_UNICODE_MAX_DECOMPOSED];
        size_t n_bytes;
        const size_t n = decompose(qsf_utf8_load(in.p + at, &n_bytes), c->is_compatible, chars);
        for (size_t i = 0; i < n; i++)
            QSF_TRY(add_char(c, chars[i]));
        at += n_bytes;
    }
    QSF_TRY(close_run(c));
    QSF_TRY(put_run(c));
    *out = (qsf_bytes){c->w->blocks[c->block], c->n_out};
    return QSF_OK;
}

static qsf_status prepend(composer *c, const qsf_step *step, qsf_bytes in, qsf_bytes *out)
{
    *out = in;
    if (in.n == 0)
        return QSF_OK;
    QSF_TRY(qsf_work_reserve(c->w, c->block, step->a.n + in.n));
    QSF_TRY(put_bytes(c, step->a.p, step->a.n));
    QSF_TRY(put_bytes(c, in.p, in.n));
    *out = (qsf_bytes){c->w->blocks[c->block], c->n_out};
    return QSF_OK;
}

static qsf_status replace(composer *c, const qsf_step *step, qsf_bytes in, qsf_bytes *out)
{
    *out = in;
    const qsf_bytes from = step->a;
    size_t n_found = 0;
    for (size_t i = 0; i + from.n <= in.n; i++)
        if (in.p[i] == from.p[0] && memcmp(in.p + i, from.p, from.n) == 0) {
            n_found++;
            i += from.n - 1;
        }
    if (n_found == 0)
        return QSF_OK;
    QSF_TRY(qsf_work_reserve(c->w, c->block, in.n - n_found * from.n + n_found * step->b.n));
    size_t begin = 0;
    for (size_t i = 0; i + from.n <= in.n; i++)
        if (in.p[i] == from.p[0] && memcmp(in.p + i, from.p, from.n) == 0) {
            QSF_TRY(put_bytes(c, in.p + begin, i - begin));
            QSF_TRY(put_bytes(c, step->b.p, step->b.n));
            begin = i + from.n;
            i = begin - 1;
        }
    QSF_TRY(put_bytes(c, in.p + begin, in.n - begin));
    *out = (qsf_bytes){c->w->blocks[c->block], c->n_out};
    return QSF_OK;
}

static qsf_status replace_matches(composer *c, const qsf_vocabulary *v, uint32_t step_idx,
                                  qsf_bytes in, qsf_bytes *out)
{
    *out = in;
    qsf_scan scan;
    qsf_bytes match;
    const unsigned char *at = in.p;
    QSF_TRY(qsf_scan_begin(&scan, v, step_idx, c->w, QSF_WORK_STEPS + (int)step_idx, in));
    for (;;) {
        QSF_TRY(qsf_scan_next(&scan, &match));
        if (match.p == NULL)
            break;
        QSF_TRY(put_bytes(c, at, (size_t)(match.p - at)));
        QSF_TRY(put_bytes(c, v->steps[step_idx].b.p, v->steps[step_idx].b.n));
        at = match.p + match.n;
        *out = (qsf_bytes){NULL, 0};
    }
    if (out->p == in.p) /* no match */
        return QSF_OK;
    QSF_TRY(put_bytes(c, at, in.n - (size_t)(at - in.p)));
    *out = (qsf_bytes){c->w->blocks[c->block], c->n_out};
    return QSF_OK;
}

/* The longest key at each place becomes its text; the rest of a character that the key ends in goes
 * too. */
static qsf_status map(composer *c, const qsf_vocabulary *v, qsf_bytes in, qsf_bytes *out)
{
    for (size_t at = 0; at < in.n;) {
        size_t end = at + qsf_utf8_length(in.p[at]);
        qsf_bytes to = {in.p + at, end - at};
        uint32_t node = 0;
        for (size_t i = at; i < in.n; i++) {
            node = qsf_tree_child(v->map_nodes, node, in.p[i]);
            if (node == 0)
                break;
            const uint32_t id = qsf_load_u32(v->map_nodes + (size_t)node * 12 + 8);
            if (id == QSF_TOKEN_NONE)
                continue;
            to = (qsf_bytes){v->pool + (id >> 8), id & 0xFF};
            for (end = i + 1; end < in.n && (in.p[end] & 0xC0) == 0x80;)
                end++;
        }
        QSF_TRY(put_bytes(c, to.p, to.n));
        at = end;
    }
    *out = (qsf_bytes){c->w->blocks[c->block], c->n_out};
    return QSF_OK;
}

qsf_status qsf_normalize(const qsf_vocabulary *v, qsf_work *w, qsf_bytes in, qsf_bytes *out)
{
    int block = QSF_WORK_NORMAL_A;
    *out = in;
    for (uint32_t i = 0; i < v->n_steps && v->steps[i].kind < QSF_STEP_SPLIT; i++) {
        const qsf_step *const step = &v->steps[i];
        const qsf_bytes before = *out;
        composer c = {.w = w, .block = block};
        c.is_compatible = step->kind == QSF_STEP_NFKC || step->kind == QSF_STEP_NFKD;
        c.is_decomposed = step->kind == QSF_STEP_NFD || step->kind == QSF_STEP_NFKD;
        c.first_unstable = c.is_compatible ? 0xA0 : c.is_decomposed ? 0xC0 : 0x300;
        if (step->kind == QSF_STEP_PREPEND)
            QSF_TRY(prepend(&c, step, before, out));
        else if (step->kind == QSF_STEP_REPLACE)
            QSF_TRY(replace(&c, step, before, out));
        else if (step->kind == QSF_STEP_MAP)
            QSF_TRY(map(&c, v, before, out));
        else if (step->kind == QSF_STEP_REPLACE_MATCHES)
            QSF_TRY(replace_matches(&c, v, i, before, out));
        else
            QSF_TRY(normalize_composed(&c, before, out));
        if (out->p != before.p)
            block = block == QSF_WORK_NORMAL_A ? QSF_WORK_NORMAL_B : QSF_WORK_NORMAL_A;
    }
    return QSF_OK;
}
