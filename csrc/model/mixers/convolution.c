/* convolution.c - which rows a convolution sees, and which of them it keeps. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/convolution.h"

#include <string.h>

void qsf_convolution_replay(const qsf_state_layer *l, size_t n_kept, size_t n_channels,
                            const float *from, const float *rows, size_t n_rows, float *to)
{
    for (size_t i = 0; i < n_kept; i++) {
        const size_t at = i + n_rows; /* in the state and then the log */
        const float *const row = at >= n_kept   ? rows + (at - n_kept) * l->row_floats
                                 : from != NULL ? from + at * n_channels
                                                : NULL;
        if (row != NULL)
            memmove(to + i * n_channels, row, n_channels * sizeof *to);
        else
            memset(to + i * n_channels, 0, n_channels * sizeof *to);
    }
}

/* Returns the channels at a position that rows of the segment see, from the chunk or from the
 * state. */
static const float *row_at(const qsf_convolution *c, const qsf_segment *g, int64_t position)
{
    if (position >= g->first_position)
        return c->rows + (g->first_row + (size_t)(position - g->first_position)) * c->stride;
    const float *const state = qsf_statecache_before(&g->sequence->states, c->layer_idx);
    const int64_t n_back = g->first_position - position; /* 1 .. n_taps - 1 */
    const size_t n_kept = c->ops->kind->n_taps - 1;
    return state == NULL ? c->ops->scratch->conv + c->ops->config->conv_cols /* zeros */
                         : state + (n_kept - (size_t)n_back) * c->n_channels;
}

void qsf_convolution_row(const qsf_convolution *c, const qsf_segment *g, uint32_t t, size_t begin,
                         size_t end, float *out)
{
    const size_t n_taps = c->ops->kind->n_taps;
    const float *rows[QSF_MAX_TAPS];
    for (size_t tap = 0; tap < n_taps; tap++)
        rows[tap] =
            row_at(c, g, (int64_t)g->first_position + t - (int64_t)(n_taps - 1 - tap)) + begin;
    c->ops->kernels->conv(rows, c->w + begin, c->n_channels, n_taps,
                          c->bias != NULL ? c->bias + begin : NULL, out, end - begin);
}

void qsf_convolution_keep(const qsf_convolution *c, const qsf_segment *g, size_t begin, size_t end)
{
    const qsf_statecache *const states = &g->sequence->states;
    const size_t n_kept = c->ops->kind->n_taps - 1;
    const size_t n_bytes = (end - begin) * sizeof(float);
    for (uint32_t i = 0; i <= states->n_stops; i++) {
        uint32_t position;
        float *const to = qsf_statecache_after(states, c->layer_idx, i, &position);
        for (size_t r = 0; r < n_kept; r++)
            memcpy(to + r * c->n_channels + begin,
                   row_at(c, g, (int64_t)position - (int64_t)(n_kept - r)) + begin, n_bytes);
    }
    for (uint32_t t = 0; t < g->n_tokens; t++) {
        const uint32_t position = g->first_position + t;
        if (position >= states->next_position)
            memcpy(qsf_statecache_row(states, c->layer_idx, position) + begin,
                   row_at(c, g, position) + begin, n_bytes);
    }
}
