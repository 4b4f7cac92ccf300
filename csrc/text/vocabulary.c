/* vocabulary.c - reads and checks the section TEXT: docs/format.md, section 9. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "text/vocabulary.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "text/utf8.h"

#define VERSION 2

/* Arrays lie one after the other, each filled up to a multiple of 8. */
typedef struct cursor {
    const unsigned char *section;
    uint64_t n_bytes;
    uint64_t at;
    bool failed;
} cursor;

static const unsigned char *take(cursor *c, uint64_t n, uint64_t element_bytes)
{
    const uint64_t begin = c->at;
    const uint64_t n_bytes = n * element_bytes; /* counts are below 2^32, elements small */
    uint64_t end;
    if (c->failed || !qsf_align_up_u64(n_bytes, 8, &end) ||
        !qsf_extent_inside(begin, end, c->n_bytes)) {
        c->failed = true;
        return c->section;
    }
    for (uint64_t i = begin + n_bytes; i < begin + end; i++)
        c->failed |= c->section[i] != 0;
    c->at = begin + end;
    return c->section + begin;
}

static qsf_status check_most(const char *field, uint32_t value, uint32_t most)
{
    QSF_FAIL_IF(value > most, FORMAT, "section TEXT: %s is %u, allowed: up to %u", field, value,
                most);
    return QSF_OK;
}

static qsf_status check_slots(const char *field, uint32_t n_slots)
{
    QSF_FAIL_IF(n_slots == 0 || (n_slots & (n_slots - 1)) != 0, FORMAT,
                "section TEXT: %s has %u slots, allowed: powers of two", field, n_slots);
    return QSF_OK;
}

/* Each of the n numbers is below `limit`, or QSF_TOKEN_NONE if allowed. */
static qsf_status check_numbers(const char *field, const unsigned char *numbers, size_t n,
                                uint32_t limit, bool may_be_none)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t value = qsf_load_u32(numbers + i * 4);
        QSF_FAIL_IF(value >= limit && !(may_be_none && value == QSF_TOKEN_NONE), FORMAT,
                    "section TEXT: %s %zu is %u, allowed: below %u%s", field, i, value, limit,
                    may_be_none ? " or none" : "");
    }
    return QSF_OK;
}

static qsf_status check_tokens(qsf_vocabulary *v, uint32_t n_text_bytes)
{
    uint32_t before = qsf_load_u32(v->offsets);
    QSF_FAIL_IF(before != 0, FORMAT, "section TEXT: the first token begins at %u", before);
    uint32_t n_tokens = 0;
    for (uint32_t id = 0; id < v->n_ids; id++) {
        const uint32_t end = qsf_load_u32(v->offsets + (size_t)id * 4 + 4);
        QSF_FAIL_IF(end < before || end - before > QSF_TEXT_MAX_TOKEN_BYTES || end > n_text_bytes ||
                        v->kinds[id] > QSF_TOKEN_ALL_KINDS,
                    FORMAT,
                    "section TEXT: token %u is of kind %u and goes from %u to %u of %u bytes", id,
                    v->kinds[id], before, end, n_text_bytes);
        n_tokens += (v->kinds[id] & QSF_TOKEN_PRESENT) != 0;
        if (end - before > v->max_token_bytes)
            v->max_token_bytes = end - before;
        before = end;
    }
    v->max_token_bytes += v->model == QSF_TEXT_WORDPIECE; /* decoding puts a space before it */
    QSF_FAIL_IF(before != n_text_bytes || n_tokens != v->n_tokens, FORMAT,
                "section TEXT: %u tokens of %u bytes, the header says %u of %u", n_tokens, before,
                v->n_tokens, n_text_bytes);
    return QSF_OK;
}

static int compare_bytes(qsf_bytes a, qsf_bytes b)
{
    const int order = memcmp(a.p, b.p, QSF_MIN(a.n, b.n));
    return order != 0 ? order : (a.n > b.n) - (a.n < b.n);
}

/* Added tokens: first those that match before normalisation; both parts sorted, without duplicates.
 */
static qsf_status check_added(qsf_vocabulary *v, uint32_t n_pool_bytes)
{
    QSF_TRY(check_most("the number of added tokens", v->n_added_raw, v->n_added));
    for (uint32_t i = 0; i < v->n_added; i++) {
        const unsigned char *const p = v->added + (size_t)i * 16;
        const uint32_t off = qsf_load_u32(p + 8);
        const uint32_t n_bytes = qsf_load_u32(p + 12);
        const bool is_normalized = i >= v->n_added_raw;
        const uint32_t flags = qsf_load_u32(p + 4);
        QSF_FAIL_IF(qsf_load_u32(p) >= v->n_ids || flags > QSF_ADDED_ALL_FLAGS ||
                        ((flags & QSF_ADDED_NORMALIZED) != 0) != is_normalized || n_bytes == 0 ||
                        n_bytes > QSF_TEXT_MAX_ADDED_BYTES ||
                        !qsf_extent_inside(off, n_bytes, n_pool_bytes) ||
                        qsf_utf8_valid_bytes(v->pool + off, n_bytes) != n_bytes,
                    FORMAT,
                    "section TEXT: added token %u is token %u with flags %u and %u bytes at %u", i,
                    qsf_load_u32(p), flags, n_bytes, off);
        const qsf_added added = qsf_vocabulary_added(v, i);
        QSF_FAIL_IF(i != 0 && i != v->n_added_raw &&
                        compare_bytes(qsf_vocabulary_added(v, i - 1).content, added.content) >= 0,
                    FORMAT, "section TEXT: added token %u is not behind the one before", i);
    }
    for (int group = 0; group < 2; group++) {
        uint32_t at = group == 0 ? 0 : v->n_added_raw;
        const uint32_t end = group == 0 ? v->n_added_raw : v->n_added;
        for (uint32_t byte = 0; byte < 257; byte++) {
            while (at < end && qsf_vocabulary_added(v, at).content.p[0] < byte)
                at++;
            v->first_added[group][byte] = at;
        }
    }
    return QSF_OK;
}

static bool has_expression(uint32_t kind)
{
    return kind == QSF_STEP_EXPRESSION || kind == QSF_STEP_REPLACE_MATCHES;
}

/* Version 1 had other steps from that of expressions on. */
static bool is_known_step(uint32_t kind, uint32_t version)
{
    return ((kind >= QSF_STEP_NFC && kind <= QSF_STEP_REPLACE_MATCHES) ||
            (kind >= QSF_STEP_SPLIT && kind < QSF_STEP_COUNT)) &&
           (!has_expression(kind) || version != 1);
}

static qsf_status check_steps(qsf_vocabulary *v, const unsigned char *steps, uint32_t n_pool_bytes,
                              uint32_t version)
{
    for (uint32_t i = 0; i < v->n_steps; i++) {
        const unsigned char *const p = steps + (size_t)i * 20;
        const uint32_t kind = qsf_load_u32(p);
        QSF_FAIL_IF(!is_known_step(kind, version), UNSUPPORTED,
                    "section TEXT of version %u: step %u is of kind %u, which this build does not "
                    "know; make the file again with `qsf convert`",
                    version, i, kind);
        qsf_step *const step = &v->steps[i];
        step->kind = (qsf_step_kind)kind;
        qsf_bytes *const strings[2] = {&step->a, &step->b};
        for (int k = 0; k < 2; k++) {
            const uint32_t off = qsf_load_u32(p + 4 + 8 * k);
            const uint32_t n_bytes = qsf_load_u32(p + 8 + 8 * k);
            QSF_FAIL_IF(!qsf_extent_inside(off, n_bytes, n_pool_bytes) ||
                            n_bytes > QSF_TEXT_MAX_ADDED_BYTES ||
                            qsf_utf8_valid_bytes(v->pool + off, n_bytes) != n_bytes,
                        FORMAT, "section TEXT: step %u has %u bytes at %u", i, n_bytes, off);
            *strings[k] = (qsf_bytes){v->pool + off, n_bytes};
        }
        const bool is_normalising = kind < QSF_STEP_SPLIT;
        QSF_FAIL_IF((kind == QSF_STEP_REPLACE && step->a.n == 0) ||
                        (kind == QSF_STEP_MAP && v->n_map_nodes == 0) ||
                        (is_normalising && i != 0 && v->steps[i - 1].kind >= QSF_STEP_SPLIT),
                    FORMAT, "section TEXT: step %u replaces nothing or comes too late", i);
    }
    return QSF_OK;
}

static uint64_t count_splits(const unsigned char *steps, uint32_t n_steps, const cursor *c)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < n_steps && !c->failed; i++)
        n += has_expression(qsf_load_u32(steps + (size_t)i * 20));
    return n;
}

static qsf_status check_classes(const qsf_vocabulary *v)
{
    bool is_right = true;
    for (size_t i = 0; v->n_classes != 0 && i < QSF_TEXT_CLASS_BLOCKS; i++)
        is_right &= qsf_load_u16(v->class_index + i * 2) < v->n_class_blocks;
    for (size_t i = 0; i < (size_t)v->n_class_blocks * QSF_TEXT_CLASS_BLOCK; i++)
        is_right &= v->class_blocks[i] < v->n_classes;
    for (size_t i = 0; v->n_classes != 0 && i < 256; i++)
        is_right &= v->byte_classes[i] < v->n_classes;
    QSF_FAIL_IF(!is_right, FORMAT, "section TEXT: a character is of a class that is none of %u",
                v->n_classes);
    return QSF_OK;
}

/* The states that entries name exist; behind the edge, the last class, there is none. Entries of
 * the first row are states alone: no match ends where one begins. */
static bool are_states(const qsf_split *s, uint32_t n_classes, uint32_t n_aheads)
{
    bool is_right = true;
    for (uint64_t i = 0; i < (uint64_t)s->n_forward * s->n_columns; i++) {
        const bool is_first = i < s->n_columns;
        const uint32_t entry = qsf_load_u16(s->forward + i * 2);
        const uint32_t state = is_first ? entry : entry & ~QSF_SPLIT_MATCH;
        const bool is_edge = i % n_classes == n_classes - 1 && !is_first;
        is_right &= state < (is_edge ? 1 : s->n_forward);
    }
    for (uint64_t i = 0; i < (uint64_t)s->n_backward * n_classes; i++) {
        const uint32_t entry = qsf_load_u16(s->backward + i * 2);
        is_right &= entry >> QSF_SPLIT_BACKWARD_BITS < 1U << n_aheads &&
                    (entry & ((1U << QSF_SPLIT_BACKWARD_BITS) - 1)) < s->n_backward;
    }
    return is_right;
}

/* Behind a step on bytes pieces are no texts: only steps of the kind may follow. */
static qsf_status check_splits(qsf_vocabulary *v, const unsigned char *rows,
                               const unsigned char *entries)
{
    uint64_t at = 0;
    bool is_on_bytes = false;
    for (uint32_t i = 0; i < v->n_steps; i++) {
        const bool is_split = has_expression(v->steps[i].kind);
        qsf_split *const s = &v->splits[i];
        uint32_t n_aheads = 0;
        if (is_split) {
            s->flags = qsf_load_u32(rows);
            s->n_forward = qsf_load_u32(rows + 4);
            s->n_backward = qsf_load_u32(rows + 8);
            n_aheads = qsf_load_u32(rows + 12);
            rows += 16;
        }
        const bool was_on_bytes = is_on_bytes;
        is_on_bytes |= (s->flags & QSF_SPLIT_ON_BYTES) != 0;
        QSF_FAIL_IF(
            is_on_bytes && (v->model != QSF_TEXT_BPE_BYTES || (s->flags & QSF_SPLIT_ON_BYTES) == 0),
            FORMAT, "section TEXT: step %u%s bytes", i, was_on_bytes ? " is not on" : " is on");
        if (!is_split)
            continue;
        const bool are_sizes = v->n_classes != 0 && n_aheads <= QSF_TEXT_MAX_AHEADS &&
                               s->n_forward != 0 && s->n_forward <= QSF_TEXT_MAX_STATES &&
                               s->n_backward <= QSF_TEXT_MAX_STATES &&
                               (n_aheads == 0) == (s->n_backward == 0);
        s->n_columns = are_sizes ? v->n_classes << n_aheads : 0;
        const uint64_t n_forward = (uint64_t)s->n_forward * s->n_columns;
        const uint64_t n_backward = (uint64_t)s->n_backward * v->n_classes;
        s->forward = entries + at * 2;
        s->backward = s->forward + n_forward * 2;
        at += n_forward + n_backward;
        const bool replaces = v->steps[i].kind == QSF_STEP_REPLACE_MATCHES;
        QSF_FAIL_IF(!are_sizes || s->flags > QSF_SPLIT_ALL_FLAGS ||
                        (replaces && (s->flags & ~(uint32_t)QSF_SPLIT_LOOKS_BEHIND) != 0) ||
                        (s->flags & QSF_SPLIT_BEHAVIORS) > QSF_SPLIT_CONTIGUOUS ||
                        at > v->n_entries || !are_states(s, v->n_classes, n_aheads),
                    FORMAT,
                    "section TEXT: the expression of step %u has %u and %u states, flags %u, or a "
                    "state that does not exist",
                    i, s->n_forward, s->n_backward, s->flags);
    }
    QSF_FAIL_IF(at != v->n_entries, FORMAT, "section TEXT: %u entries, its expressions have %llu",
                v->n_entries, (unsigned long long)at);
    return QSF_OK;
}

/* Children come after their parent, so a walk ends; a node's children are sorted by byte. */
static qsf_status check_tree(const unsigned char *nodes, uint32_t n_nodes, uint32_t n_ids)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        const unsigned char *const p = nodes + (size_t)i * 12;
        const uint32_t first = qsf_load_u32(p);
        const uint32_t n_children = qsf_load_u32(p + 4) >> 8;
        const uint32_t id = qsf_load_u32(p + 8);
        QSF_FAIL_IF(n_children > 256 || (n_children != 0 && first <= i) ||
                        !qsf_extent_inside(first, n_children, n_nodes) ||
                        (id >= n_ids && id != QSF_TOKEN_NONE),
                    FORMAT, "section TEXT: node %u has %u children from %u on and token %u", i,
                    n_children, first, id);
    }
    return QSF_OK;
}

/* Checks the replacements of texts; these lie in the pool. */
static qsf_status check_map(const qsf_vocabulary *v, uint32_t n_pool_bytes)
{
    QSF_TRY(check_tree(v->map_nodes, v->n_map_nodes, QSF_TOKEN_NONE));
    for (uint32_t i = 0; i < v->n_map_nodes; i++) {
        const uint32_t id = qsf_load_u32(v->map_nodes + (size_t)i * 12 + 8);
        QSF_FAIL_IF(id != QSF_TOKEN_NONE &&
                        (!qsf_extent_inside(id >> 8, id & 0xFF, n_pool_bytes) ||
                         qsf_utf8_valid_bytes(v->pool + (id >> 8), id & 0xFF) != (id & 0xFF)),
                    FORMAT, "section TEXT: node %u of the map has %u bytes at %u", i, id & 0xFF,
                    id >> 8);
    }
    return QSF_OK;
}

static qsf_status check_nodes(const qsf_vocabulary *v)
{
    QSF_TRY(check_tree(v->nodes, v->n_nodes, v->n_ids));
    for (uint32_t id = 0; id < v->n_ids && v->model == QSF_TEXT_UNIGRAM; id++) {
        const uint64_t bits = qsf_load_u64(v->scores + (size_t)id * 8);
        double score;
        memcpy(&score, &bits, sizeof score);
        QSF_FAIL_IF(!isfinite(score), FORMAT, "section TEXT: the score of token %u is not finite",
                    id);
    }
    QSF_FAIL_IF(v->model == QSF_TEXT_UNIGRAM && (v->n_nodes == 0 || !isfinite(v->unk_score)),
                FORMAT, "section TEXT: a unigram model without a tree or score");
    return QSF_OK;
}

static qsf_status check_header(const qsf_vocabulary *v, const unsigned char *section)
{
    QSF_TRY(check_most("the model", (uint32_t)v->model, QSF_TEXT_MODEL_COUNT - 1));
    QSF_TRY(check_most("flags", v->flags, QSF_TEXT_ALL_FLAGS));
    QSF_TRY(check_most("the number of leading spaces", v->n_leading, 16));
    QSF_TRY(check_most("the number of ids", v->n_ids, QSF_TEXT_MAX_IDS));
    QSF_TRY(check_slots("the table of tokens", v->n_slots));
    QSF_TRY(check_slots("the table of merges", v->n_merge_slots));
    QSF_TRY(check_most("the length of the prefix", v->n_prefix, QSF_TEXT_MAX_PREFIX));
    QSF_TRY(check_most("the number of steps", v->n_steps, QSF_TEXT_MAX_STEPS));
    QSF_TRY(check_most("the number of classes", v->n_classes, QSF_TEXT_MAX_CLASSES));
    QSF_TRY(check_most("the number of probes", v->max_probes, QSF_TEXT_MAX_PROBES));
    for (size_t i = 96; i < QSF_TEXT_HEADER_BYTES; i++)
        QSF_FAIL_IF(section[i] != 0, FORMAT, "section TEXT: reserved byte %zu is %u, allowed: 0", i,
                    section[i]);
    QSF_FAIL_IF(v->unk_id != QSF_TOKEN_NONE && v->unk_id >= v->n_ids, FORMAT,
                "section TEXT: the unknown token is %u, allowed: below %u or none", v->unk_id,
                v->n_ids);
    return QSF_OK;
}

static void load_header(qsf_vocabulary *v, const unsigned char *p)
{
    v->model = (qsf_text_model)qsf_load_u32(p + 4);
    v->flags = qsf_load_u32(p + 8);
    v->n_leading = qsf_load_u32(p + 12);
    v->n_ids = qsf_load_u32(p + 16);
    v->n_tokens = qsf_load_u32(p + 20);
    v->unk_id = qsf_load_u32(p + 24);
    v->n_slots = qsf_load_u32(p + 32);
    v->n_merges = qsf_load_u32(p + 36);
    v->n_merge_slots = qsf_load_u32(p + 40);
    v->n_added = qsf_load_u32(p + 44);
    v->n_added_raw = qsf_load_u32(p + 48);
    v->n_prefix = qsf_load_u32(p + 52);
    v->n_steps = qsf_load_u32(p + 56);
    v->n_nodes = qsf_load_u32(p + 64);
    v->max_probes = qsf_load_u32(p + 68);
    v->n_map_nodes = qsf_load_u32(p + 80);
    v->n_classes = qsf_load_u32(p + 84);
    v->n_class_blocks = qsf_load_u32(p + 88);
    v->n_entries = qsf_load_u32(p + 92);
    const uint64_t bits = qsf_load_u64(p + 72);
    memcpy(&v->unk_score, &bits, sizeof bits);
}

qsf_status qsf_vocabulary_init(qsf_vocabulary *v, const unsigned char *section, size_t n_bytes)
{
    memset(v, 0, sizeof *v);
    QSF_FAIL_IF(n_bytes < QSF_TEXT_HEADER_BYTES || n_bytes > QSF_TEXT_MAX_BYTES, FORMAT,
                "section TEXT has %zu bytes, allowed: %d to %u", n_bytes, QSF_TEXT_HEADER_BYTES,
                QSF_TEXT_MAX_BYTES);
    const uint32_t version = qsf_load_u32(section);
    QSF_FAIL_IF(version == 0 || version > VERSION, UNSUPPORTED,
                "section TEXT is of version %u, this build reads versions 1 to %d", version,
                VERSION);
    load_header(v, section);
    QSF_TRY(check_header(v, section));
    const uint32_t n_text_bytes = qsf_load_u32(section + 28);
    const uint32_t n_pool_bytes = qsf_load_u32(section + 60);
    cursor c = {section, n_bytes, QSF_TEXT_HEADER_BYTES, false};
    v->offsets = take(&c, (uint64_t)v->n_ids + 1, 4);
    v->kinds = take(&c, v->n_ids, 1);
    v->text = take(&c, n_text_bytes, 1);
    v->slots = take(&c, v->n_slots, 4);
    v->unit_ids = take(&c, 256, 4);
    v->byte_ids = take(&c, 256, 4);
    v->merges = take(&c, v->n_merges, 12);
    v->merge_slots = take(&c, v->n_merge_slots, 4);
    v->added = take(&c, v->n_added, 16);
    v->prefix = take(&c, v->n_prefix, 4);
    const unsigned char *const steps = take(&c, v->n_steps, 20);
    v->pool = take(&c, n_pool_bytes, 1);
    v->scores = take(&c, v->model == QSF_TEXT_UNIGRAM ? v->n_ids : 0, 8);
    v->nodes = take(&c, v->n_nodes, 12);
    v->map_nodes = take(&c, v->n_map_nodes, 12);
    const bool has_classes = v->n_classes != 0;
    v->class_index = take(&c, has_classes ? QSF_TEXT_CLASS_BLOCKS : 0, 2);
    v->class_blocks = take(&c, v->n_class_blocks, QSF_TEXT_CLASS_BLOCK);
    v->byte_classes = take(&c, has_classes ? 256 : 0, 1);
    const unsigned char *const splits = take(&c, count_splits(steps, v->n_steps, &c), 16);
    const unsigned char *const entries = take(&c, v->n_entries, 2);
    QSF_FAIL_IF(c.failed || c.at != n_bytes, FORMAT,
                "section TEXT: its tables do not fill its %zu bytes exactly", n_bytes);
    QSF_TRY(check_tokens(v, n_text_bytes));
    QSF_TRY(check_numbers("slot", v->slots, v->n_slots, v->n_ids, true));
    QSF_TRY(check_numbers("unit", v->unit_ids, 256, v->n_ids, true));
    QSF_TRY(check_numbers("byte", v->byte_ids, 256, v->n_ids, true));
    QSF_TRY(check_numbers("merge", v->merges, (size_t)v->n_merges * 3, v->n_ids, false));
    QSF_TRY(check_numbers("merge slot", v->merge_slots, v->n_merge_slots, v->n_merges, true));
    QSF_TRY(check_numbers("prefix", v->prefix, v->n_prefix, v->n_ids, false));
    QSF_TRY(check_added(v, n_pool_bytes));
    QSF_TRY(check_steps(v, steps, n_pool_bytes, version));
    QSF_TRY(check_classes(v));
    QSF_TRY(check_splits(v, splits, entries));
    QSF_TRY(check_map(v, n_pool_bytes));
    return check_nodes(v);
}

uint32_t qsf_vocabulary_find(const qsf_vocabulary *v, qsf_bytes text)
{
    uint32_t h = UINT32_C(0x811C9DC5);
    for (size_t i = 0; i < text.n; i++)
        h = (h ^ text.p[i]) * UINT32_C(0x01000193);
    const uint32_t mask = v->n_slots - 1;
    uint32_t slot = (h ^ h >> 15) & mask;
    for (uint32_t i = 0; i < v->max_probes; i++) {
        const uint32_t id = qsf_load_u32(v->slots + (size_t)slot * 4);
        if (id == QSF_TOKEN_NONE)
            return id;
        const qsf_bytes candidate = qsf_vocabulary_text(v, id);
        if (candidate.n == text.n && memcmp(candidate.p, text.p, text.n) == 0)
            return id;
        slot = (slot + 1) & mask;
    }
    return QSF_TOKEN_NONE;
}

uint32_t qsf_tree_child(const unsigned char *nodes, uint32_t node, unsigned char byte)
{
    const unsigned char *const p = nodes + (size_t)node * 12;
    uint32_t low = qsf_load_u32(p);
    uint32_t high = low + (qsf_load_u32(p + 4) >> 8);
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        const unsigned char here = nodes[(size_t)middle * 12 + 4];
        if (here == byte)
            return middle;
        if (here < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}
