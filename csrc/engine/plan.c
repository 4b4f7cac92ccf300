/* plan.c - the arithmetic of plan.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/plan.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "engine/ceiling.h"
#include "engine/draft.h"
#include "engine/residence.h"
#include "io/io.h"
#include "stream/stream.h"

#define MIB ((size_t)1 << 20)

#define DEFAULT_CTX_TOKENS 4096
/* The same where units are streamed and it takes much of the memory. */
#define PATIENT_CTX_TOKENS 1024
#define PART_FOR_KV 8
/* Tokens that share one pass over the weights, and one hand-over of each matrix to the threads. */
#define DEFAULT_CHUNK_TOKENS 64
/* More tokens per unpacked tile, and, where units are streamed, per pass over the disk. */
#define LARGE_CHUNK_TOKENS 256

/* What the disk reads (1 to 2 GB/s) in 8 to 16 ms: as long as a token is chosen, or a large kept
 * layer or the head is computed. */
#define RING_TARGET_BYTES (16 * MIB)
#define LEAST_RING_RUNG_BYTES (2 * MIB)
/* The disk is about that much slower than computing from memory, so a ring of this part of the
 * longest run of kept units is full when the run ends, and a larger one never is. */
#define RING_PART_OF_RUN 8
#define MAX_RING_BYTES (256 * MIB)
#define RING_STEP_BYTES (MIB / 16)
#define DEFAULT_IO_DEPTH 4

#define MAX_EMBEDDING_ROWS 256
#define EMBEDDING_PART_OF_CEILING 64

/* Of the room for weights, what a larger chunk, ring or cache may take. */
#define PART_FOR_MORE 8

/* Keeping a unit may make the buffers smaller, which makes room for another one. */
#define MAX_ROUNDS 4

/* More than anyone has: what a sum or product that does not fit becomes. */
#define TOO_MANY_BYTES UINT64_MAX

/* What is given up first when memory is short, and down to where. Half the ring goes first: what
 * it covers is pauses of the computation, a few milliseconds a token. A chunk of 16 still shares a
 * pass over the weights between many tokens, so it goes before the context. Below a few megabytes
 * of ring, reads get small and disk or processor idles in turns, so that goes late, with what
 * costs little time and gives little memory. A cache of 2 bits goes last of all: the other rungs
 * cost time or length, this one the quality of every word (bench/LOG.md). */
static const struct rung {
    enum { RUNG_RING, RUNG_CHUNK, RUNG_CTX, RUNG_ROWS, RUNG_DEPTH, RUNG_KV } what;
    uint32_t floor; /* tokens, bytes or reads */
} ladder[] = {
    {RUNG_RING, 8 * MIB}, {RUNG_CHUNK, 16}, {RUNG_CTX, 512},      {RUNG_RING, 4 * MIB},
    {RUNG_CHUNK, 4},      {RUNG_CTX, 256},  {RUNG_RING, 2 * MIB}, {RUNG_ROWS, 0},
    {RUNG_CHUNK, 1},      {RUNG_RING, 0},   {RUNG_DEPTH, 1},      {RUNG_KV, 0},
};

/* Two bits for keys or values, unless the caller chose. */
static bool narrow_kv(const qsf_options *opt, qsf_choice *how)
{
    bool is_smaller = false;
    if (opt->exact != 0)
        return false;
    if (opt->kv_k_type == QSF_KV_DEFAULT && how->kv_k_bits > QSF_KV_2BIT) {
        how->kv_k_bits = QSF_KV_2BIT;
        is_smaller = true;
    }
    if (opt->kv_v_type == QSF_KV_DEFAULT && how->kv_v_bits > QSF_KV_2BIT) {
        how->kv_v_bits = QSF_KV_2BIT;
        is_smaller = true;
    }
    return is_smaller;
}

/* Halves *n_tokens towards the floor, unless the caller asked for a number. */
static bool halve(uint32_t asked_tokens, uint32_t floor_tokens, uint32_t *n_tokens)
{
    if (asked_tokens != 0 || *n_tokens <= floor_tokens)
        return false;
    *n_tokens = *n_tokens / 2 > floor_tokens ? *n_tokens / 2 : floor_tokens;
    return true;
}

static bool shrink_ring(size_t floor_bytes, size_t *ring_bytes)
{
    if (*ring_bytes <= floor_bytes)
        return false;
    *ring_bytes = *ring_bytes > LEAST_RING_RUNG_BYTES ? *ring_bytes / 2 : 0;
    return true;
}

static bool drop_rows(uint32_t *n_rows)
{
    const bool is_smaller = *n_rows != 0;
    *n_rows = 0;
    return is_smaller;
}

static bool descend(const qsf_options *opt, const struct rung *r, qsf_choice *how)
{
    switch (r->what) {
    case RUNG_RING:
        return shrink_ring(r->floor, &how->ring_bytes);
    case RUNG_CHUNK:
        return halve(opt->chunk_tokens, r->floor, &how->chunk_tokens);
    case RUNG_CTX:
        return halve(opt->ctx_tokens, r->floor, &how->ctx_tokens);
    case RUNG_ROWS:
        return drop_rows(&how->n_embedding_rows);
    case RUNG_DEPTH:
        return halve(opt->io_depth, r->floor, &how->io_depth);
    case RUNG_KV:
        return narrow_kv(opt, how);
    }
    return false;
}

/* The next smaller choice; false when this is the smallest. */
static bool shrink(const qsf_options *opt, qsf_choice *how)
{
    bool is_smaller = false;
    for (size_t i = 0; !is_smaller && i < sizeof ladder / sizeof ladder[0]; i++)
        is_smaller = descend(opt, &ladder[i], how);
    if (how->chunk_tokens > how->ctx_tokens)
        how->chunk_tokens = how->ctx_tokens;
    return is_smaller;
}

static uint32_t most_embedding_rows(const qsf_config *c, uint64_t ceiling_bytes)
{
    const uint64_t n_rows =
        ceiling_bytes / EMBEDDING_PART_OF_CEILING / qsf_plan_embedding_bytes(c, 1);
    return ceiling_bytes == 0 || n_rows > MAX_EMBEDDING_ROWS ? MAX_EMBEDDING_ROWS
                                                             : (uint32_t)n_rows;
}

static qsf_status first_choice(const qsf_plan_input *in, uint64_t ceiling_bytes, qsf_choice *how)
{
    const qsf_options *const opt = in->options;
    const uint32_t max_tokens = in->config->max_tokens;
    if (opt->ctx_tokens > max_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "a context of %u tokens: this model was made for at most %u",
                        opt->ctx_tokens, max_tokens);
    if (opt->kv_rotation == QSF_KV_ROTATION_ON && !qsf_kvcache_can_rotate(in->config))
        return QSF_FAIL(QSF_ERR_ARG,
                        "heads of %u dimensions cannot be rotated: only of 16, 32, .. 4096",
                        in->config->head_dim);
    const uint32_t default_bits = opt->exact != 0 ? QSF_KV_F32 : QSF_KV_4BIT;
    how->kv_k_bits = opt->kv_k_type != QSF_KV_DEFAULT ? opt->kv_k_type : default_bits;
    how->kv_v_bits = opt->kv_v_type != QSF_KV_DEFAULT ? opt->kv_v_type : default_bits;
    how->ctx_tokens = opt->ctx_tokens;
    if (how->ctx_tokens == 0)
        how->ctx_tokens = max_tokens < DEFAULT_CTX_TOKENS ? max_tokens : DEFAULT_CTX_TOKENS;
    how->chunk_tokens = opt->chunk_tokens != 0 ? opt->chunk_tokens : DEFAULT_CHUNK_TOKENS;
    if (how->chunk_tokens > how->ctx_tokens)
        how->chunk_tokens = how->ctx_tokens;
    how->ring_bytes = RING_TARGET_BYTES;
    how->io_depth = opt->io_depth != 0 ? opt->io_depth : DEFAULT_IO_DEPTH;
    how->n_embedding_rows = most_embedding_rows(in->config, ceiling_bytes);
    return QSF_OK;
}

/* Takes `how` instead if the whole then needs no more than most_bytes. */
static bool try_choice(qsf_draft *d, const qsf_choice *how, uint64_t most_bytes)
{
    const qsf_choice before = d->how;
    d->how = *how;
    qsf_draft_add_up(d);
    if (qsf_draft_fits(d->plan) && qsf_draft_needed_bytes(d->plan) <= most_bytes)
        return true;
    d->how = before;
    qsf_draft_add_up(d);
    return false;
}

/* Doubles the chunk as long as the whole then needs no more than most_bytes. */
static void grow_chunk(qsf_draft *d, uint64_t most_bytes)
{
    qsf_choice how = d->how;
    do {
        how.chunk_tokens *= 2;
        if (d->in->options->chunk_tokens != 0 || how.chunk_tokens > LARGE_CHUNK_TOKENS ||
            d->how.chunk_tokens == d->how.ctx_tokens)
            return;
        if (how.chunk_tokens > how.ctx_tokens)
            how.chunk_tokens = how.ctx_tokens;
    } while (try_choice(d, &how, most_bytes));
}

static uint64_t with_an_eighth(const qsf_plan *plan)
{
    return qsf_draft_needed_bytes(plan) + qsf_draft_room_bytes(plan) / PART_FOR_MORE;
}

/* A rung often frees more than was missing. Of what is left, and would all go to weights, each of
 * these may take an eighth. For the chunk: twice the tokens halve the passes over the disk that a
 * prompt takes, as far as those are what it waits for; each pass costs all that is streamed,
 * while the eighth costs every token at most an eighth of what keeping units saves it. */
static void grow(qsf_draft *d)
{
    qsf_choice how = d->how;
    how.io_depth = d->in->options->io_depth != 0 ? d->in->options->io_depth : DEFAULT_IO_DEPTH;
    (void)try_choice(d, &how, with_an_eighth(d->plan));
    const uint64_t most_bytes = with_an_eighth(d->plan);
    for (how = d->how; how.ring_bytes < RING_TARGET_BYTES;) {
        how.ring_bytes = how.ring_bytes == 0 ? LEAST_RING_RUNG_BYTES : how.ring_bytes * 2;
        if (!try_choice(d, &how, most_bytes))
            break;
    }
    grow_chunk(d, with_an_eighth(d->plan));
    how = d->how;
    how.n_embedding_rows = most_embedding_rows(d->in->config, d->plan->ceiling_bytes);
    (void)try_choice(d, &how, with_an_eighth(d->plan));
}

/* What no unit fits into any more lets reading run further ahead, as far as that is of use (and
 * after that, lets the chunk grow). */
static void widen_ring(qsf_draft *d)
{
    const qsf_plan *const plan = d->plan;
    const uint64_t run_bytes = qsf_residence_longest_run_bytes(d->in->reader, d->is_resident);
    const uint64_t room = qsf_draft_room_bytes(plan);
    uint64_t ring_bytes = run_bytes / RING_PART_OF_RUN;
    if (ring_bytes > MAX_RING_BYTES)
        ring_bytes = MAX_RING_BYTES;
    if (ring_bytes < RING_TARGET_BYTES) /* it may have been given up for the context */
        ring_bytes = RING_TARGET_BYTES;
    if (ring_bytes <= plan->ring_bytes)
        return;
    if (ring_bytes - plan->ring_bytes > room - room / 32) /* its records take some too */
        ring_bytes = plan->ring_bytes + (room - room / 32);
    qsf_choice how = d->how;
    how.ring_bytes = (size_t)ring_bytes / RING_STEP_BYTES * RING_STEP_BYTES;
    if (how.ring_bytes > plan->ring_bytes)
        (void)try_choice(d, &how, plan->ceiling_bytes);
}

/* Is that all in the end, with every unit resident or all but an embedding table of which a
 * token takes a row? */
static bool fits_without_streaming(qsf_draft *d)
{
    const qsf_reader *const r = d->in->reader;
    memset(d->is_resident, 1, r->n_units * sizeof *d->is_resident);
    qsf_draft_add_up(d);
    if (!qsf_draft_fits(d->plan) && !qsf_stream_passes_ring(r, 0)) {
        d->is_resident[0] = false;
        qsf_draft_add_up(d);
    }
    return qsf_draft_fits(d->plan);
}

/* A long context costs speed where weights are streamed, and few conversations use it: the KV cache
 * may take an eighth of the ceiling, or what PATIENT_CTX_TOKENS take. */
static bool shorten_context(qsf_draft *d)
{
    const uint64_t most_bytes = d->plan->ceiling_bytes / PART_FOR_KV;
    return d->plan->kv_bytes > most_bytes &&
           halve(d->in->options->ctx_tokens, PATIENT_CTX_TOKENS, &d->how.ctx_tokens);
}

/* Every unit that passes through the ring is read once a token. Of an embedding table that is not
 * the head too, a few rows are; so that one comes last. */
static void choose_resident(qsf_draft *d)
{
    bool is_streaming = !fits_without_streaming(d);
    while (is_streaming && shorten_context(d))
        is_streaming = !fits_without_streaming(d);
    if (!is_streaming) {
        grow_chunk(d, TOO_MANY_BYTES);
        return;
    }
    qsf_draft_choose_least(d);
    grow(d);
    for (uint32_t i = 0; i < MAX_ROUNDS; i++) {
        if (qsf_residence_add(d->in->reader, qsf_draft_room_bytes(d->plan), d->is_resident) == 0)
            break;
        qsf_draft_add_up(d);
        assert(qsf_draft_fits(d->plan));
    }
    widen_ring(d);
    grow_chunk(d, TOO_MANY_BYTES);
    if (!d->is_resident[0]) {
        d->is_resident[0] = true;
        qsf_draft_add_up(d);
        d->is_resident[0] = qsf_draft_fits(d->plan);
        qsf_draft_add_up(d);
    }
}

/* The plan, of these options, that needs the least memory. */
static qsf_status plan_least(qsf_draft *d)
{
    QSF_TRY(first_choice(d->in, d->plan->ceiling_bytes, &d->how));
    while (shrink(d->in->options, &d->how)) {
    }
    qsf_draft_choose_least(d);
    return QSF_OK;
}

/* What the plan needs at least with other options than were asked for. */
static uint64_t least_with(const qsf_draft *d, const qsf_options *opt)
{
    qsf_plan_input in = *d->in;
    qsf_plan plan = *d->plan;
    qsf_draft other = *d;
    in.options = opt;
    plan.n_threads = opt->n_threads;
    other.in = &in;
    other.plan = &plan;
    return plan_least(&other) == QSF_OK ? qsf_draft_needed_bytes(&plan) : TOO_MANY_BYTES;
}

/* Writes which one of the options helps most, if one does: "; with .. it would be ..". */
static void describe_relief(const qsf_draft *d, char *text, size_t text_bytes)
{
    const qsf_options *const asked = d->in->options;
    qsf_options shorter = *asked; /* each is the same but for one thing */
    qsf_options bits = *asked;
    qsf_options chunk = *asked;
    qsf_options sessions = *asked;
    qsf_options threads = *asked;
    qsf_options rough = *asked;
    const uint32_t ctx_tokens = asked->ctx_tokens > 512 ? 512 : 256;
    shorter.ctx_tokens = asked->ctx_tokens > ctx_tokens ? ctx_tokens : asked->ctx_tokens;
    bits.kv_k_type = bits.kv_v_type = asked->exact != 0 ? asked->kv_k_type : QSF_KV_2BIT;
    chunk.chunk_tokens = asked->chunk_tokens != 0 ? 1 : 0;
    sessions.max_sessions = threads.n_threads = 1;
    rough.exact = 0;
    const struct {
        const qsf_options *options;
        const char *name;
    } reliefs[] = {
        {&shorter, ctx_tokens == 512 ? "a context of 512 tokens" : "a context of 256 tokens"},
        {&bits, "2 bits in the KV cache"},
        {&chunk, "prompt chunks of 1 token"},
        {&sessions, "one session"},
        {&threads, "one thread"},
        {&rough, "arithmetic that is not exact"},
    };
    uint64_t best_bytes = d->plan->min_budget_bytes;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof reliefs / sizeof reliefs[0]; i++) {
        const uint64_t n_bytes = least_with(d, reliefs[i].options);
        if (n_bytes >= best_bytes)
            continue;
        best_bytes = n_bytes;
        snprintf(text, text_bytes, "; with %s it would be %llu", reliefs[i].name,
                 (unsigned long long)n_bytes);
    }
}

/* The plan is the least, and does not fit. */
static qsf_status refuse(const qsf_draft *d, const qsf_supply *supply)
{
    const qsf_plan *const plan = d->plan;
    char relief[128];
    describe_relief(d, relief, sizeof relief);
    if (plan->ceiling_bytes == plan->budget_bytes &&
        d->in->options->budget_bytes != QSF_BUDGET_AUTO)
        return QSF_FAIL(
            QSF_ERR_NOMEM,
            "a budget of %llu bytes is too small: the process already uses %llu, %llu "
            "are kept for the caller, and the engine needs at least %llu; the smallest "
            "budget that would do is %llu%s",
            (unsigned long long)plan->budget_bytes, (unsigned long long)plan->process_bytes,
            (unsigned long long)plan->reserve_bytes, (unsigned long long)plan->engine_bytes,
            (unsigned long long)plan->min_budget_bytes, relief);
    const uint64_t supply_bytes = qsf_add_capped(supply->process_bytes, supply->available_bytes);
    const uint64_t free_bytes =
        supply_bytes > plan->ceiling_bytes ? supply_bytes - plan->ceiling_bytes : 0;
    return QSF_FAIL(
        QSF_ERR_NOMEM,
        "%s has only %llu bytes left for this process, of which %llu stay free: it already uses "
        "%llu, %llu are kept for the caller, and the engine needs at least %llu; the smallest "
        "budget that would do is %llu%s",
        supply->limit_bytes != 0 ? "the control group" : "the machine",
        (unsigned long long)supply->available_bytes, (unsigned long long)free_bytes,
        (unsigned long long)plan->process_bytes, (unsigned long long)plan->reserve_bytes,
        (unsigned long long)plan->engine_bytes, (unsigned long long)plan->min_budget_bytes, relief);
}

qsf_status qsf_plan_make(const qsf_plan_input *in, qsf_plan *plan, bool *is_resident)
{
    const qsf_options *const opt = in->options;
    const uint32_t depth = opt->io_depth != 0 ? opt->io_depth : DEFAULT_IO_DEPTH;
    const qsf_supply supply = {in->process_bytes, in->available_bytes, in->limit_bytes,
                               qsf_io_locked_bytes(opt->io_method, depth)};
    *plan = (qsf_plan){
        .budget_bytes = opt->budget_bytes == QSF_BUDGET_AUTO
                            ? qsf_ceiling_auto_budget_bytes(&supply)
                            : opt->budget_bytes,
        .process_bytes = in->process_bytes,
        .reserve_bytes = opt->reserve_bytes,
        .n_units = in->reader->n_units,
        .n_threads = opt->n_threads,
        .max_sessions = opt->max_sessions,
    };
    plan->ceiling_bytes = qsf_ceiling_bytes(&supply, plan->budget_bytes);
    for (uint32_t i = 0; i < in->reader->n_units; i++)
        plan->model_bytes = qsf_add_capped(plan->model_bytes, in->reader->units[i].raw_bytes);
    qsf_draft d = {.in = in, .plan = plan, .is_resident = is_resident};
    qsf_draft_find_levels(&d);
    QSF_TRY(plan_least(&d));
    plan->min_budget_bytes = qsf_draft_needed_bytes(plan);
    if (!qsf_draft_fits(plan))
        return refuse(&d, &supply);
    QSF_TRY(first_choice(in, plan->ceiling_bytes, &d.how));
    for (qsf_draft_choose_least(&d); !qsf_draft_fits(plan); qsf_draft_choose_least(&d))
        (void)shrink(opt, &d.how);
    choose_resident(&d);
    return QSF_OK;
}
