/* ngrams.c - a table of 256 KB, independent of the vocabulary. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "speculate/ngrams.h"

#include <string.h>

#define N_ENTRIES_LOG2 15

static uint64_t hash_of(const uint32_t *tokens, uint32_t n_tokens, uint32_t n_before)
{
    const uint64_t last = tokens[n_tokens - 1];
    const uint64_t before = n_before == 2 ? (uint64_t)tokens[n_tokens - 2] + 1 : 0;
    uint64_t z = (last + (before << 32)) * UINT64_C(0x9E3779B97F4A7C15);
    z ^= z >> 32;
    return z * UINT64_C(0xBF58476D1CE4E5B9);
}

static qsf_ngram_entry *entry_of(const qsf_ngrams *f, uint64_t hash)
{
    return &f->entries[hash >> (64 - N_ENTRIES_LOG2)];
}

static uint32_t tag_of(uint64_t hash)
{
    return (uint32_t)hash | 1U;
}

void qsf_ngrams_layout(qsf_ngrams *f, qsf_arena *a)
{
    f->entries = qsf_arena_push(a, (size_t)1 << N_ENTRIES_LOG2, sizeof *f->entries);
    /* Writing a page first avoids a second page fault, which interrupts every core that runs the
     * process. */
    if (f->entries != NULL)
        memset(f->entries, 0, sizeof *f->entries << N_ENTRIES_LOG2);
}

qsf_ngram_token qsf_ngram_token_of(uint32_t token, double probability)
{
    qsf_ngram_token f = {.token = token & 0xFFFFFF, .class = probability < 0.8};
    for (; probability < 0.5 && f.class < QSF_NGRAM_CLASSES - 1; probability *= 2.0)
        f.class ++;
    return f;
}

void qsf_ngrams_learn(qsf_ngrams *f, const uint32_t *tokens, uint32_t n_tokens,
                      qsf_ngram_token likeliest)
{
    for (uint32_t n_before = 1; n_before <= 2 && n_before <= n_tokens; n_before++) {
        const uint64_t hash = hash_of(tokens, n_tokens, n_before);
        qsf_ngram_entry *const e = entry_of(f, hash);
        e->tag = tag_of(hash);
        e->next = likeliest;
    }
}

const qsf_ngram_token *qsf_ngrams_find(const qsf_ngrams *f, const uint32_t *tokens,
                                       uint32_t n_tokens, uint32_t n_before)
{
    if (n_tokens < n_before)
        return NULL;
    const uint64_t hash = hash_of(tokens, n_tokens, n_before);
    const qsf_ngram_entry *const e = entry_of(f, hash);
    return e->tag == tag_of(hash) ? &e->next : NULL;
}

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
