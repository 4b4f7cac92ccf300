/* seen.c - the arithmetic of seen.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/seen.h"

#include "base/checked.h"

qsf_seen qsf_seen_at(const qsf_layer_kind *k, const qsf_segment *g, size_t position)
{
    const size_t window = k->window_tokens;
    const size_t first = window != 0 && position >= window ? position + 1 - window : 0;
    size_t end = position + 1;
    if (k->is_encoder != 0) {
        end = (size_t)g->first_position + g->n_tokens;
        end = window != 0 && position + window < end ? position + window : end;
    }
    return first <= k->pinned_tokens ? (qsf_seen){0, 0, end}
                                     : (qsf_seen){k->pinned_tokens, first, end};
}

qsf_span_range qsf_seen_slots(qsf_seen seen, size_t begin)
{
    const size_t span_end = begin + QSF_KV_SPAN_TOKENS;
    const size_t first = seen.first > begin ? seen.first : begin;
    const size_t window_end = seen.end < span_end ? seen.end : span_end;
    const size_t pinned_end = seen.pinned < span_end ? seen.pinned : span_end;
    const size_t end = first < window_end ? window_end : pinned_end;
    if (end <= begin)
        return (qsf_span_range){0, 0};
    return (qsf_span_range){
        .begin = seen.pinned > begin ? 0 : (uint32_t)(first - begin),
        .end = (uint32_t)(end - begin),
    };
}

static size_t end_span(qsf_seen seen)
{
    return qsf_ceil_div(seen.end, QSF_KV_SPAN_TOKENS);
}

qsf_spans qsf_seen_spans(const qsf_layer_kind *k, const qsf_segment *g)
{
    const qsf_seen seen = qsf_seen_at(k, g, g->first_position);
    const size_t last = (size_t)g->first_position + g->n_tokens - 1;
    const size_t first = seen.first / QSF_KV_SPAN_TOKENS;
    const size_t n_pinned = qsf_ceil_div(seen.pinned, QSF_KV_SPAN_TOKENS);
    qsf_spans all = {n_pinned < first ? n_pinned : first, first, 0};
    all.n = all.n_pinned + end_span(qsf_seen_at(k, g, last)) - first;
    return all;
}

size_t qsf_seen_most_spans(const qsf_layer_kind *k, size_t chunk_tokens, size_t ctx_tokens)
{
    const size_t n_all = qsf_ceil_div(ctx_tokens, QSF_KV_SPAN_TOKENS);
    const size_t n_seen = qsf_ceil_div(k->pinned_tokens, QSF_KV_SPAN_TOKENS) +
                          qsf_ceil_div(k->window_tokens + chunk_tokens, QSF_KV_SPAN_TOKENS) + 1;
    return k->window_tokens != 0 && k->is_encoder == 0 && n_seen < n_all ? n_seen : n_all;
}
