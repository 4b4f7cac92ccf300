/* plan.c - the arithmetic of plan.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "cache/kv/kvcache.h"
#include "io/io.h"
#include "stream/stream.h"

#define MIB ((size_t)1 << 20)
#define LEAST_AUTO_BYTES (200 * MIB)

static bool is_known(const qsf_supply *s)
{
    return s->available_bytes != 0 || s->limit_bytes != 0;
}

/* Resident and available bytes, less kept_bytes; never 0, because 0 means no limit. */
static uint64_t supply_without(const qsf_supply *s, uint64_t kept_bytes)
{
    const uint64_t taken_bytes =
        s->available_bytes > kept_bytes ? s->available_bytes - kept_bytes : 0;
    const uint64_t sum = qsf_add_capped(s->process_bytes, taken_bytes);
    return sum > 0 ? sum : 1;
}

uint64_t qsf_ceiling_margin_bytes(const qsf_supply *s)
{
    if (s->limit_bytes != 0) {
        const uint64_t share_bytes = s->limit_bytes / 100;
        return qsf_add_capped(QSF_MAX(share_bytes, 2 * MIB), s->locked_bytes);
    }
    const uint64_t share_bytes = s->available_bytes / 16;
    return QSF_MIN(share_bytes, 256 * MIB);
}

uint64_t qsf_ceiling_bytes(const qsf_supply *s, uint64_t budget_bytes)
{
    if (!is_known(s))
        return budget_bytes;
    const uint64_t supply_bytes = supply_without(s, qsf_ceiling_margin_bytes(s));
    return budget_bytes == 0 ? supply_bytes : QSF_MIN(budget_bytes, supply_bytes);
}

uint64_t qsf_ceiling_auto_budget_bytes(const qsf_supply *s)
{
    if (!is_known(s))
        return LEAST_AUTO_BYTES;
    const uint64_t half_bytes = qsf_add_capped(s->process_bytes, s->available_bytes) / 2;
    return QSF_MAX(half_bytes, LEAST_AUTO_BYTES);
}

/* ---- the steps of the plan ---- */

/* Context if units are streamed and the KV cache would exceed its share. */
#define PATIENT_CTX_TOKENS 1024
#define PART_FOR_KV 8
/* A chunk shares one pass over the weights, and one parallel region for each matrix. */
#define DEFAULT_CHUNK_TOKENS 64
/* Unpacks each tile, and reads each streamed unit, for more tokens at once. */
#define LARGE_CHUNK_TOKENS 256
/* A chunk reads nearly all experts, so each doubling of the chunk halves the reading of a
 * prompt. */
#define EXPERTS_CHUNK_TOKENS 1024

/* Bytes that a disk of 1 to 2 GB/s reads in 8 to 16 ms: the time to choose a token, or to compute a
 * large resident layer or the head. */
#define RING_TARGET_BYTES (16 * MIB)
#define LEAST_RING_RUNG_BYTES (2 * MIB)
/* Reading is about 8 times slower than computing from memory. So a ring of an eighth of the longest
 * resident run is full when the run ends, and a larger one is never full. */
#define RING_PART_OF_RUN 8
#define MAX_RING_BYTES (256 * MIB)
#define RING_STEP_BYTES (MIB / 16)

#define MAX_EMBEDDING_ROWS 256
#define EMBEDDING_PART_OF_CEILING 64

/* Share of the free memory that a larger chunk, ring or cache may take from weights. */
#define PART_FOR_MORE 8
#define PART_FOR_CHUNK 4 /* the same of the chunk of a mixture of experts */

/* A resident unit may make the buffers smaller, which makes room for another unit. */
#define MAX_ROUNDS 4

/* Replaces a sum or product that does not fit 64 bits. */
#define TOO_MANY_BYTES UINT64_MAX

/* The parts that are reduced when memory is short, in this order, each with its floor. Half the
 * ring is first: it only hides pauses of the computation, a few milliseconds a token. A chunk of
 * 16 tokens still shares a pass over the weights, so it is reduced before the context. A ring
 * below a few MB makes reads small and lets disk and processor wait for each other, so it is late,
 * with the steps that cost little time and save little memory. No step reduces text quality: the
 * types of keys and values depend on the model and the options, never on the budget. */
static const struct rung {
    enum { RUNG_RING, RUNG_CHUNK, RUNG_DRAFTS, RUNG_CTX, RUNG_ROWS, RUNG_DEPTH } kind;
    uint32_t floor; /* tokens, bytes or reads */
} ladder[] = {
    {RUNG_RING, 8 * MIB}, {RUNG_CHUNK, 16}, {RUNG_DRAFTS, 0}, {RUNG_CTX, 512},
    {RUNG_RING, 4 * MIB}, {RUNG_CHUNK, 4},  {RUNG_CTX, 256},  {RUNG_RING, 2 * MIB},
    {RUNG_ROWS, 0},       {RUNG_CHUNK, 1},  {RUNG_RING, 0},   {RUNG_DEPTH, 1},
};

/* Halves *n_tokens, down to floor_tokens, unless the caller set a number: option_tokens != 0. */
static bool halve(uint32_t option_tokens, uint32_t floor_tokens, uint32_t *n_tokens)
{
    if (option_tokens != 0 || *n_tokens <= floor_tokens)
        return false;
    *n_tokens = *n_tokens / 2 > floor_tokens ? *n_tokens / 2 : floor_tokens;
    return true;
}

/* Halves the context, or its part in memory if older pages may lie in a file. */
static bool shorten(const qsf_options *opt, uint32_t floor_tokens, qsf_choice *how)
{
    if (opt->kv_folder == NULL)
        return halve(opt->ctx_tokens | opt->ctx_is_fixed, floor_tokens, &how->ctx_tokens);
    return halve(opt->kv_resident_tokens, floor_tokens, &how->resident_tokens);
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
    switch (r->kind) {
    case RUNG_RING:
        return shrink_ring(r->floor, &how->ring_bytes);
    case RUNG_CHUNK:
        return halve(opt->chunk_tokens, r->floor, &how->chunk_tokens);
    case RUNG_DRAFTS:
        return halve(0, r->floor, &how->draft_rows);
    case RUNG_CTX:
        return shorten(opt, r->floor, how);
    case RUNG_ROWS:
        return drop_rows(&how->n_embedding_rows);
    case RUNG_DEPTH:
        return halve(opt->io_depth, r->floor, &how->io_depth);
    }
    return false;
}

/* Makes the choice one step smaller; false if it is the smallest. */
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

/* Returns the option, or the file's default bits, which its conversion measured; 8 if it has
 * none. */
static uint32_t kv_bits(const qsf_options *opt, uint32_t of_option, uint32_t of_file)
{
    if (of_option != QSF_KV_DEFAULT)
        return of_option;
    return opt->exact != 0 ? QSF_KV_F32 : of_file != 0 ? of_file : QSF_KV_8BIT;
}

static qsf_status first_choice(const qsf_plan_input *in, uint64_t ceiling_bytes, qsf_choice *how)
{
    const qsf_options *const opt = in->options;
    const uint32_t max_tokens = in->config->max_tokens;
    QSF_FAIL_IF(opt->ctx_tokens > max_tokens, ARG,
                "the context of %u tokens is too long: this model allows at most %u",
                opt->ctx_tokens, max_tokens);
    QSF_FAIL_IF(opt->kv_rotation == QSF_KV_ROTATION_ON && !qsf_kvcache_can_rotate(in->config), ARG,
                "heads of %u dimensions cannot be rotated: kv_rotation needs 16 to 4096",
                in->config->head_dim);
    how->kv_k_bits = kv_bits(opt, opt->kv_k_type, in->reader->arch.kv_key_bits);
    how->kv_v_bits = kv_bits(opt, opt->kv_v_type, in->reader->arch.kv_value_bits);
    how->ctx_tokens = opt->ctx_tokens;
    if (how->ctx_tokens == 0)
        how->ctx_tokens = QSF_MIN(max_tokens, QSF_DEFAULT_CTX_TOKENS);
    how->resident_tokens = opt->kv_folder != NULL && opt->kv_resident_tokens != 0
                               ? opt->kv_resident_tokens
                               : how->ctx_tokens;
    how->chunk_tokens = opt->chunk_tokens != 0 ? opt->chunk_tokens : DEFAULT_CHUNK_TOKENS;
    if (how->chunk_tokens > how->ctx_tokens)
        how->chunk_tokens = how->ctx_tokens;
    how->ring_bytes = RING_TARGET_BYTES;
    how->draft_rows = opt->draft_rows;
    how->io_depth = opt->io_depth != 0 ? opt->io_depth : QSF_IO_USUAL_DEPTH;
    how->n_embedding_rows = most_embedding_rows(in->config, ceiling_bytes);
    return QSF_OK;
}

/* Applies change `how` if the plan then needs at most most_bytes. */
static bool try_choice(qsf_candidate *d, const qsf_choice *how, uint64_t most_bytes)
{
    const qsf_choice before = d->how;
    d->how = *how;
    qsf_candidate_add_up(d);
    if (qsf_candidate_fits(d->plan) && qsf_candidate_needed_bytes(d->plan) <= most_bytes)
        return true;
    d->how = before;
    qsf_candidate_add_up(d);
    return false;
}

/* Doubles the chunk while the plan needs at most most_bytes. */
static void grow_chunk(qsf_candidate *d, uint64_t most_bytes)
{
    const uint32_t most_tokens =
        d->plan->n_experts == 0 ? LARGE_CHUNK_TOKENS : EXPERTS_CHUNK_TOKENS;
    qsf_choice how = d->how;
    do {
        how.chunk_tokens *= 2;
        if (d->in->options->chunk_tokens != 0 || how.chunk_tokens > most_tokens ||
            d->how.chunk_tokens == d->how.ctx_tokens)
            return;
        if (how.chunk_tokens > how.ctx_tokens)
            how.chunk_tokens = how.ctx_tokens;
    } while (try_choice(d, &how, most_bytes));
}

static uint64_t with_an_eighth(const qsf_plan *plan)
{
    return qsf_candidate_needed_bytes(plan) + qsf_candidate_room_bytes(plan) / PART_FOR_MORE;
}

/* Experts need all remaining memory, so a chunk may take only a part of it: a quarter, because a
 * prompt reads nearly all experts for each chunk, and a quarter of the slots has fewer hits. */
static uint64_t most_for_chunk(const qsf_candidate *d)
{
    return d->plan->n_experts == 0 ? TOO_MANY_BYTES
                                   : qsf_candidate_needed_bytes(d->plan) +
                                         qsf_candidate_room_bytes(d->plan) / PART_FOR_CHUNK;
}

/* Right drafts save whole passes, so drafts may take half of the rest. */
static void grow_drafts(qsf_candidate *d)
{
    qsf_choice how = d->how;
    how.draft_rows = d->in->options->draft_rows;
    const uint64_t most_bytes =
        qsf_candidate_needed_bytes(d->plan) + qsf_candidate_room_bytes(d->plan) / 2;
    while (how.draft_rows > d->how.draft_rows && !try_choice(d, &how, most_bytes))
        how.draft_rows /= 2;
}

/* A step of the ladder often frees more than is needed. Each of these buffers may take an eighth of
 * the surplus, the rest goes to weights. A chunk twice as large halves the passes of a prompt, each
 * of which reads all streamed units. The price: at most an eighth of the surplus holds no weights.
 */
static void grow(qsf_candidate *d)
{
    grow_drafts(d);
    qsf_choice how = d->how;
    how.io_depth = d->in->options->io_depth != 0 ? d->in->options->io_depth : QSF_IO_USUAL_DEPTH;
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

/* Memory too small for another unit makes the ring larger, up to its useful size, and then the
 * chunk. */
static void widen_ring(qsf_candidate *d)
{
    const qsf_plan *const plan = d->plan;
    const uint64_t run_bytes = qsf_residence_longest_run_bytes(d->in->reader, d->is_resident);
    const uint64_t room = qsf_candidate_room_bytes(plan);
    uint64_t ring_bytes = run_bytes / RING_PART_OF_RUN;
    if (ring_bytes > MAX_RING_BYTES)
        ring_bytes = MAX_RING_BYTES;
    if (ring_bytes < RING_TARGET_BYTES) /* the ladder may have reduced it for the context */
        ring_bytes = RING_TARGET_BYTES;
    if (ring_bytes <= plan->ring_bytes)
        return;
    if (ring_bytes - plan->ring_bytes > room - room / 32) /* a 32nd is for its records */
        ring_bytes = plan->ring_bytes + (room - room / 32);
    qsf_choice how = d->how;
    how.ring_bytes = (size_t)ring_bytes / RING_STEP_BYTES * RING_STEP_BYTES;
    if (how.ring_bytes > plan->ring_bytes)
        (void)try_choice(d, &how, plan->ceiling_bytes);
}

/* True if nothing is streamed except a separate embedding table, of which each token reads one
 * row; its cache is planned later. */
static bool fits_without_streaming(qsf_candidate *d)
{
    const qsf_reader *const r = d->in->reader;
    const uint32_t n_rows = d->how.n_embedding_rows;
    memset(d->is_resident, 1, r->n_stream_units * sizeof *d->is_resident);
    d->how.n_embedding_rows = 0;
    qsf_candidate_add_up(d);
    if (!qsf_stream_passes_ring(r, r->embedding_unit))
        qsf_candidate_weigh_table(d);
    if (qsf_candidate_fits(d->plan))
        return true;
    d->how.n_embedding_rows = n_rows;
    return false;
}

/* True if nothing is streamed, with as many drafts as fit. */
static bool fits_with_fewer_drafts(qsf_candidate *d)
{
    const uint32_t draft_rows = d->how.draft_rows;
    bool does_fit = fits_without_streaming(d);
    while (!does_fit && halve(0, 0, &d->how.draft_rows))
        does_fit = fits_without_streaming(d);
    d->how.draft_rows = does_fit ? d->how.draft_rows : draft_rows;
    return does_fit;
}

/* If weights are streamed, a long context costs speed, and few conversations need it: the KV cache
 * may take an eighth of the ceiling, or the bytes of PATIENT_CTX_TOKENS. */
static bool shorten_context(qsf_candidate *d)
{
    const uint64_t most_bytes = d->plan->ceiling_bytes / PART_FOR_KV;
    return d->plan->kv_bytes > most_bytes && shorten(d->in->options, PATIENT_CTX_TOKENS, &d->how);
}

/* Gives the remaining memory to a cache of embedding rows. */
static void add_rows(qsf_candidate *d)
{
    if (d->is_resident[d->in->reader->embedding_unit])
        return;
    qsf_choice how = d->how;
    how.n_embedding_rows = most_embedding_rows(d->in->config, d->plan->ceiling_bytes);
    while (how.n_embedding_rows > d->how.n_embedding_rows && !try_choice(d, &how, TOO_MANY_BYTES))
        how.n_embedding_rows /= 2;
    qsf_candidate_weigh_table(d);
}

/* Gives the remaining memory to expert slots, in addition to the slots already planned. */
static void add_slots(qsf_candidate *d)
{
    qsf_plan *const plan = d->plan;
    if (plan->n_experts == 0)
        return;
    d->how.n_expert_slots = 0;
    qsf_candidate_add_up(d);
    d->how.n_expert_slots = qsf_candidate_count_slots(d, qsf_candidate_room_bytes(plan));
    qsf_candidate_add_up(d);
    assert(qsf_candidate_fits(plan));
}

/* Each token of a pass needs other experts, so the experts of a wrong draft are read in vain. */
static void drop_drafts(qsf_candidate *d)
{
    if (d->how.draft_rows == 0 ||
        4 * (uint64_t)d->plan->expert_slots >= 3 * (uint64_t)d->plan->n_experts)
        return;
    d->how.draft_rows = 0;
    qsf_candidate_add_up(d);
    add_slots(d);
}

/* Chooses the layers, and perhaps the head, that fit in memory with the remaining buffers. */
static void choose_streamed(qsf_candidate *d)
{
    qsf_candidate_choose_least(d);
    grow(d);
    for (uint32_t i = 0; i < MAX_ROUNDS; i++) {
        if (qsf_residence_add(d->in->reader, qsf_candidate_room_bytes(d->plan), d->is_resident) ==
            0)
            break;
        qsf_candidate_add_up(d);
        assert(qsf_candidate_fits(d->plan));
    }
    if (d->plan->n_experts == 0)
        widen_ring(d);
}

/* Each pass reads every streamed unit, but only a few rows of a separate embedding table. So the
 * table's cache comes after the chunk, and the whole table after the experts: none of these
 * becomes smaller with more budget. */
static void choose_resident(qsf_candidate *d)
{
    bool is_streaming = !fits_with_fewer_drafts(d);
    while (is_streaming && shorten_context(d))
        is_streaming = !fits_with_fewer_drafts(d);
    if (is_streaming)
        choose_streamed(d);
    grow_chunk(d, most_for_chunk(d));
    add_rows(d);
    add_slots(d);
    drop_drafts(d);
    bool *const has_table = &d->is_resident[d->in->reader->embedding_unit];
    if (!*has_table && !d->in->has_table_on_disk) {
        *has_table = true;
        qsf_candidate_add_up(d);
        *has_table = qsf_candidate_fits(d->plan);
        qsf_candidate_add_up(d);
    }
}

/* Makes the smallest plan for these options. */
static qsf_status plan_least(qsf_candidate *d)
{
    QSF_TRY(first_choice(d->in, d->plan->ceiling_bytes, &d->how));
    while (shrink(d->in->options, &d->how)) {
    }
    qsf_candidate_choose_least(d);
    return QSF_OK;
}

/* Returns the bytes that the smallest plan needs with other options. */
static uint64_t least_with(const qsf_candidate *d, const qsf_options *opt)
{
    qsf_plan_input in = *d->in;
    qsf_plan plan = *d->plan;
    qsf_candidate other = *d;
    in.options = opt;
    plan.n_threads = opt->n_threads;
    other.in = &in;
    other.plan = &plan;
    return plan_least(&other) == QSF_OK ? qsf_candidate_needed_bytes(&plan) : TOO_MANY_BYTES;
}

/* Rounds up, so that a budget of this size works. */
static unsigned long long whole_mb(uint64_t n_bytes)
{
    return n_bytes / MIB + (n_bytes % MIB != 0);
}

/* Writes which single option saves the most memory; empty if none does. */
static void describe_relief(const qsf_candidate *d, char *text, size_t text_bytes)
{
    const qsf_options *const opt = d->in->options;
    qsf_options shorter = *opt; /* each differs from opt in one field */
    qsf_options bits = *opt;
    qsf_options chunk = *opt;
    qsf_options sessions = *opt;
    qsf_options threads = *opt;
    qsf_options rough = *opt;
    const uint32_t ctx_tokens = opt->ctx_tokens > 512 ? 512 : 256;
    shorter.ctx_tokens = QSF_MIN(opt->ctx_tokens, ctx_tokens);
    bits.kv_k_type = bits.kv_v_type = opt->exact != 0 ? opt->kv_k_type : QSF_KV_2BIT;
    chunk.chunk_tokens = opt->chunk_tokens != 0 ? 1 : 0;
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
        {&rough, "exact arithmetic off"},
    };
    uint64_t best_bytes = d->plan->min_budget_bytes;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof reliefs / sizeof reliefs[0]; i++) {
        const uint64_t n_bytes = least_with(d, reliefs[i].options);
        if (n_bytes >= best_bytes)
            continue;
        best_bytes = n_bytes;
        snprintf(text, text_bytes, "; with %s, %llu MB would work", reliefs[i].name,
                 whole_mb(n_bytes));
    }
}

/* Reports that the smallest plan does not fit. */
static qsf_status refuse(const qsf_candidate *d, const qsf_supply *supply)
{
    const qsf_plan *const plan = d->plan;
    char relief[128];
    describe_relief(d, relief, sizeof relief);
    QSF_FAIL_IF(
        plan->ceiling_bytes == plan->budget_bytes, NOMEM,
        "the memory budget of %.1f MB is too small: the process already uses %.1f MB, the caller "
        "reserves %.1f MB, and the engine needs at least %.1f MB; a budget of %llu MB would work%s",
        qsf_mb(plan->budget_bytes), qsf_mb(plan->process_bytes), qsf_mb(plan->reserve_bytes),
        qsf_mb(plan->engine_bytes), whole_mb(plan->min_budget_bytes), relief);
    const uint64_t supply_bytes = qsf_add_capped(supply->process_bytes, supply->available_bytes);
    const uint64_t free_bytes =
        supply_bytes > plan->ceiling_bytes ? supply_bytes - plan->ceiling_bytes : 0;
    return QSF_FAIL(NOMEM,
                    "%s has only %.1f MB left, of which %.1f MB stay free: the process already "
                    "uses %.1f MB, the caller reserves %.1f MB, and the engine needs at least %.1f "
                    "MB; %llu MB in all would work%s",
                    supply->limit_bytes != 0 ? "the control group" : "the machine",
                    qsf_mb(supply->available_bytes), qsf_mb(free_bytes),
                    qsf_mb(plan->process_bytes), qsf_mb(plan->reserve_bytes),
                    qsf_mb(plan->engine_bytes), whole_mb(plan->min_budget_bytes), relief);
}

qsf_status qsf_plan_make(const qsf_plan_input *in, qsf_plan *plan, bool *is_resident)
{
    const qsf_options *const opt = in->options;
    const uint32_t depth = opt->io_depth != 0 ? opt->io_depth : QSF_IO_USUAL_DEPTH;
    const qsf_supply supply = {
        .process_bytes = in->process_bytes,
        .available_bytes = in->available_bytes,
        .limit_bytes = in->limit_bytes,
        .locked_bytes = qsf_io_locked_bytes(opt->io_method, depth),
    };
    *plan = (qsf_plan){
        .budget_bytes = opt->budget_bytes == QSF_BUDGET_AUTO
                            ? qsf_ceiling_auto_budget_bytes(&supply)
                            : opt->budget_bytes,
        .process_bytes = in->process_bytes,
        .reserve_bytes = opt->reserve_bytes,
        .n_units = in->reader->n_pass_units,
        .n_threads = opt->n_threads,
        .logits_rows = opt->logits_rows != 0   ? opt->logits_rows
                       : opt->max_sessions > 1 ? opt->max_sessions
                                               : 0,
    };
    plan->ceiling_bytes = qsf_ceiling_bytes(&supply, plan->budget_bytes);
    for (uint32_t i = 0; i < in->reader->n_pass_units; i++)
        plan->model_bytes = qsf_add_capped(plan->model_bytes,
                                           in->reader->units[in->reader->pass_units[i]].raw_bytes);
    qsf_candidate d = {.in = in, .plan = plan, .is_resident = is_resident};
    qsf_candidate_find_experts(&d);
    qsf_candidate_find_tiers(&d);
    QSF_TRY(plan_least(&d));
    plan->min_budget_bytes = qsf_candidate_needed_bytes(plan);
    if (!qsf_candidate_fits(plan))
        return refuse(&d, &supply);
    QSF_TRY(first_choice(in, plan->ceiling_bytes, &d.how));
    for (qsf_candidate_choose_least(&d); !qsf_candidate_fits(plan); qsf_candidate_choose_least(&d))
        (void)shrink(opt, &d.how);
    choose_resident(&d);
    return QSF_OK;
}
