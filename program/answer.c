/* answer.c - one answer; plans, files and answers as lines of text or as JSON. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now_seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* What could steer a terminal becomes U+FFFD there. */
static void show(const char *p, size_t n)
{
    const bool is_terminal = isatty(1) != 0;
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)p[i];
        const bool is_c1 = c == 0xC2 && i + 1 < n && (unsigned char)p[i + 1] < 0xA0;
        if (!is_terminal || (!is_c1 && c != 0x7F && (c >= 0x20 || c == '\n' || c == '\t')))
            putchar(c);
        else
            fputs("\xEF\xBF\xBD", stdout);
        i += is_terminal && is_c1;
    }
    fflush(stdout);
}

typedef struct progress {
    const request *r;
    const chat_form *form;
    bool is_shown;
    bool is_stopped; /* by a stop text */
    size_t n_shown;  /* bytes of the text */
    answer *out;
} progress;

/* The stop texts of the command line, then those of the file; NULL after the last one. */
static const char *stop_text(const progress *p, uint32_t i)
{
    if (i < p->r->n_stops)
        return p->r->stops[i];
    return i - p->r->n_stops < p->form->n_stops ? p->form->stops[i - p->r->n_stops].p : NULL;
}

/* Bytes at the end of the text that may become a stop text. */
static size_t held_bytes(const progress *p)
{
    const buffer *const text = &p->out->text;
    size_t most = 0;
    const char *stop;
    for (uint32_t i = 0; (stop = stop_text(p, i)) != NULL; i++)
        for (size_t n = strlen(stop) - 1; n > most; n--)
            if (text->n - p->n_shown >= n && memcmp(text->p + text->n - n, stop, n) == 0)
                most = n;
    return most;
}

/* Cuts the text where a stop text is complete: the first to end, of two the longer. Sets the reason
 * for the end. */
static bool cut_at_stop(const progress *p)
{
    buffer *const text = &p->out->text;
    size_t best_end = SIZE_MAX;
    size_t best = 0;
    const char *stop;
    for (uint32_t i = 0; (stop = stop_text(p, i)) != NULL; i++) {
        const size_t n = strlen(stop);
        const size_t at = buffer_find(text, p->n_shown, stop, n);
        if (at < text->n && (at + n < best_end || (at + n == best_end && at < best))) {
            best_end = at + n;
            best = at;
            p->out->reason = i < p->r->n_stops ? "stop" : "end";
        }
    }
    if (best_end == SIZE_MAX)
        return false;
    text->n = best;
    return true;
}

/* Takes what was added to the text; true if it has ended at a stop text. */
static bool take_text(progress *p, bool is_last)
{
    buffer *const text = &p->out->text;
    p->is_stopped = cut_at_stop(p);
    const size_t n_held = p->is_stopped || is_last ? 0 : held_bytes(p);
    const size_t n_new = text->n - n_held - p->n_shown;
    if (p->is_shown)
        show(text->p + p->n_shown, n_new);
    p->n_shown += n_new;
    return p->is_stopped;
}

static bool is_end(const opened *o, uint32_t token)
{
    for (uint32_t i = 0; i < o->form.n_ends; i++)
        if (o->form.ends[i] == token)
            return true;
    return false;
}

static void evaluate_prompt(opened *o, const token_list *tokens, answer *out)
{
    const double start = now_seconds();
    out->n_prompt = tokens->n;
    out->n_evaluated = tokens->n - qsf_session_common(o->session, tokens->ids, tokens->n);
    for (size_t n_done = 0; n_done < tokens->n;)
        check(qsf_session_sync(o->session, tokens->ids, tokens->n, &n_done));
    out->prompt_seconds = now_seconds() - start;
}

/* Adds a token to the text; true if the answer goes on. */
static bool take_token(opened *o, progress *p, uint32_t token, qsf_text_decoder *decoder,
                       char *room, token_list *tokens)
{
    answer *const out = p->out;
    out->n_generated++;
    if (is_end(o, token)) {
        out->reason = "end";
        return false;
    }
    tokens_add(tokens, token);
    size_t n_bytes;
    check(qsf_decoder_push(o->text, decoder, token, room, (size_t)o->text_facts.room_bytes,
                           &n_bytes));
    buffer_add(&out->text, room, n_bytes);
    if (take_text(p, false))
        return false;
    if (out->n_generated >= p->r->max_tokens)
        out->reason = "length";
    else if (tokens->n > o->facts.plan.ctx_tokens)
        out->reason = "context";
    return out->reason == NULL;
}

void answer_prompt(opened *o, const request *r, uint64_t seed, bool begins_text, bool is_shown,
                   token_list *tokens, answer *out)
{
    *out = (answer){0};
    buffer_add(&out->text, "", 0);
    progress p = {.r = r, .form = &o->form, .is_shown = is_shown, .out = out};
    if (tokens->n == 0)
        fail("the prompt has no tokens");
    const double start = now_seconds();
    evaluate_prompt(o, tokens, out);
    qsf_text_decoder decoder;
    qsf_decoder_init(o->text, begins_text ? QSF_DETOKENIZE_START : 0, &decoder);
    char *const room = grown(NULL, (size_t)o->text_facts.room_bytes + 4);
    for (bool goes_on = r->max_tokens > 0; goes_on;) {
        const double begun = now_seconds();
        uint32_t token;
        qsf_status status = QSF_OK;
        if (out->n_generated > 0)
            status = qsf_session_step(o->session, tokens->ids[tokens->n - 1]);
        if (status == QSF_ERR_CANCELLED && was_interrupted()) {
            out->reason = "cancelled";
            break;
        }
        check(status);
        check(qsf_session_sample(o->session, &o->how, tokens->ids, tokens->n, &seed, &token));
        if (out->n_generated == 0)
            out->first_seconds = now_seconds() - start;
        else
            out->step_seconds += now_seconds() - begun;
        goes_on = take_token(o, &p, token, &decoder, room, tokens);
    }
    if (out->reason == NULL)
        out->reason = "length";
    if (!p.is_stopped) {
        buffer_add(&out->text, room, qsf_decoder_flush(&decoder, room));
        (void)take_text(&p, true);
    }
    free(room);
}

/* ---- reports ---- */

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
        {"adapters", "adapters_bytes", plan->adapters_bytes},
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
