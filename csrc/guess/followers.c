/* followers.c - a table of 512 KB, whatever the vocabulary. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "guess/followers.h"

#define N_ENTRIES_LOG2 16

static uint64_t hash_of(const uint32_t *tokens, uint32_t n_tokens, uint32_t n_before)
{
    const uint64_t last = tokens[n_tokens - 1];
    const uint64_t before = n_before == 2 ? (uint64_t)tokens[n_tokens - 2] + 1 : 0;
    uint64_t z = (last + (before << 32)) * UINT64_C(0x9E3779B97F4A7C15);
    z ^= z >> 32;
    return z * UINT64_C(0xBF58476D1CE4E5B9);
}

static qsf_follower *entry_of(const qsf_followers *f, uint64_t hash)
{
    return &f->entries[hash >> (64 - N_ENTRIES_LOG2)];
}

static uint32_t tag_of(uint64_t hash)
{
    return (uint32_t)hash | 1U;
}

void qsf_followers_layout(qsf_followers *f, qsf_arena *a)
{
    f->entries = qsf_arena_push(a, (size_t)1 << N_ENTRIES_LOG2, sizeof *f->entries);
}

void qsf_followers_learn(qsf_followers *f, const uint32_t *tokens, uint32_t n_tokens,
                         uint32_t token)
{
    for (uint32_t n_before = 1; n_before <= 2 && n_before <= n_tokens; n_before++) {
        const uint64_t hash = hash_of(tokens, n_tokens, n_before);
        *entry_of(f, hash) = (qsf_follower){tag_of(hash), token};
    }
}

bool qsf_followers_find(const qsf_followers *f, const uint32_t *tokens, uint32_t n_tokens,
                        uint32_t n_before, uint32_t *token)
{
    if (n_tokens < n_before)
        return false;
    const uint64_t hash = hash_of(tokens, n_tokens, n_before);
    const qsf_follower *const e = entry_of(f, hash);
    *token = e->token;
    return e->tag == tag_of(hash);
}
