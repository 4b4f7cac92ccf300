/* report.c - plans, files and answers as lines of text or as JSON. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "json.h"
#include "stop.h"

typedef struct row {
    const char *name; /* for people */
    const char *key;  /* in JSON: the field of qsf.h */
    uint64_t value;
} row;

static void print_json_rows(const row *rows, size_t n, const char *before)
{
    printf("{%s", before);
    for (size_t i = 0; i < n; i++)
        printf("%s\"%s\": %" PRIu64, i == 0 && *before == '\0' ? "" : ", ", rows[i].key,
               rows[i].value);
    puts("}");
}

void print_plan(const qsf_plan *plan, bool is_json)
{
    const row rows[] = {
        {"process before opening", "process_bytes", plan->process_bytes},
        {"reserved", "reserve_bytes", plan->reserve_bytes},
        {"weights in memory", "weights_bytes", plan->weights_bytes},
        {"buffers for the others", "stream_bytes", plan->stream_bytes},
        {"embedding", "embedding_bytes", plan->embedding_bytes},
        {"experts", "experts_bytes", plan->experts_bytes},
        {"KV cache", "kv_bytes", plan->kv_bytes},
        {"activations", "scratch_bytes", plan->scratch_bytes},
        {"draft model", "drafter_bytes", plan->drafter_bytes},
        {"tables", "tables_bytes", plan->tables_bytes},
        {"stacks", "stacks_bytes", plan->stacks_bytes},
        {"budget", "budget_bytes", plan->budget_bytes},
        {"least budget", "min_budget_bytes", plan->min_budget_bytes},
        {"read from the file per token", "streamed_bytes", plan->streamed_bytes},
    };
    const size_t n = sizeof rows / sizeof rows[0];
    char counts[200];
    snprintf(counts, sizeof counts,
             "\"ctx_tokens\": %u, \"n_units\": %u, \"n_units_resident\": %u, \"n_threads\": %u",
             plan->ctx_tokens, plan->n_units, plan->n_units_resident, plan->n_threads);
    if (is_json) {
        print_json_rows(rows, n, counts);
        return;
    }
    puts("memory, MB of 2^20 bytes");
    for (size_t i = 0; i < n; i++)
        if (rows[i].value > 0)
            printf("  %-44s%10.1f\n", rows[i].name, (double)rows[i].value / 1048576);
    printf("  %u of %u units in memory, a context of %u tokens, %u threads\n",
           plan->n_units_resident, plan->n_units, plan->ctx_tokens, plan->n_threads);
}

void print_facts(const qsf_model_facts *facts, bool is_json)
{
    const row rows[] = {
        {"file_bytes", "file_bytes", facts->file_bytes},
        {"n_parameters", "n_parameters", facts->n_parameters},
        {"n_layers", "n_layers", facts->n_layers},
        {"dim", "dim", facts->dim},
        {"n_heads", "n_heads", facts->n_heads},
        {"n_kv_heads", "n_kv_heads", facts->n_kv_heads},
        {"head_dim", "head_dim", facts->head_dim},
        {"ffn_dim", "ffn_dim", facts->ffn_dim},
        {"n_vocab", "n_vocab", facts->n_vocab},
        {"max_tokens", "max_tokens", facts->max_tokens},
    };
    const size_t n = sizeof rows / sizeof rows[0];
    char words[100];
    snprintf(words, sizeof words, "\"architecture\": \"%s\", \"dtype\": \"%s\"",
             facts->architecture, facts->quant_type);
    if (is_json) {
        print_json_rows(rows, n, words);
        return;
    }
    printf("  %-16s%s\n  %-16s%s\n", "architecture", facts->architecture, "dtype",
           facts->quant_type);
    for (size_t i = 0; i < n; i++)
        printf("  %-16s%" PRIu64 "\n", rows[i].name, rows[i].value);
}

static double rate(size_t n, double seconds)
{
    return seconds > 0 ? (double)n / seconds : 0;
}

void print_answer_json(const opened *o, const answer *a, const token_list *tokens, uint64_t seed)
{
    qsf_machine machine;
    check(qsf_machine_describe(&machine));
    buffer line = {0};
    buffer_add_text(&line, "{\"text\": ");
    json_add_text(&line, a->text.p, a->text.n);
    buffer_add_text(&line, ", \"ids\": [");
    for (size_t i = a->n_prompt; i < tokens->n; i++) {
        char id[16];
        snprintf(id, sizeof id, "%s%u", i > a->n_prompt ? ", " : "", tokens->ids[i]);
        buffer_add_text(&line, id);
    }
    const size_t n_steps = a->n_generated > 0 ? a->n_generated - 1 : 0;
    qsf_stats stats;
    qsf_session_stats(o->session, &stats);
    uint64_t n_drafted = 0;
    uint64_t n_accepted = 0;
    for (int i = 0; i < QSF_N_GUESSERS; i++) {
        n_drafted += stats.n_drafted[i];
        n_accepted += stats.n_accepted[i];
    }
    char rest[500];
    snprintf(rest, sizeof rest,
             "], \"stop_reason\": \"%s\", \"seed\": %" PRIu64 ", \"prompt_tokens\": %zu, "
             "\"generated_tokens\": %zu, \"prompt_tokens_per_s\": %.6g, \"tokens_per_s\": %.6g, "
             "\"first_token_s\": %.6g, \"peak_bytes\": %" PRIu64 ", \"budget_bytes\": %" PRIu64
             ", \"context_tokens\": %u, \"drafted_tokens\": %" PRIu64
             ", \"accepted_tokens\": %" PRIu64 "}",
             a->reason, seed, a->n_prompt, a->n_generated, rate(a->n_evaluated, a->prompt_seconds),
             rate(n_steps, a->step_seconds), a->first_seconds, machine.peak_bytes,
             o->facts.plan.budget_bytes, o->facts.plan.ctx_tokens, n_drafted, n_accepted);
    buffer_add_text(&line, rest);
    puts(line.p);
    buffer_free(&line);
}

void print_speed(const opened *o, const answer *a)
{
    const qsf_plan *const plan = &o->facts.plan;
    const uint64_t taken_bytes = plan->process_bytes + plan->reserve_bytes + plan->engine_bytes;
    const uint64_t allowed_bytes =
        plan->ceiling_bytes != 0 ? plan->ceiling_bytes : plan->budget_bytes;
    qsf_machine machine;
    check(qsf_machine_describe(&machine));
    fprintf(stderr,
            "prompt %zu tokens, %.1f tok/s; generated %zu tokens, %.1f tok/s; peak %.1f MB; in "
            "memory %" PRIu64 " MB of at most %" PRIu64 " MB, context %u\n",
            a->n_prompt, rate(a->n_evaluated, a->prompt_seconds), a->n_generated,
            rate(a->n_generated > 0 ? a->n_generated - 1 : 0, a->step_seconds),
            (double)machine.peak_bytes / 1048576, (taken_bytes + 1048575) >> 20,
            (allowed_bytes + 1048575) >> 20, plan->ctx_tokens);
}
