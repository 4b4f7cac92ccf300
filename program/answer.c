/* answer.c - one answer. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "stop.h"

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

/* Bytes at the end of the text that may become a stop text. */
static size_t held_bytes(const request *r, const buffer *text, size_t from)
{
    size_t most = 0;
    for (uint32_t i = 0; i < r->n_stops; i++)
        for (size_t n = strlen(r->stops[i]) - 1; n > most; n--)
            if (text->n - from >= n && memcmp(text->p + text->n - n, r->stops[i], n) == 0)
                most = n;
    return most;
}

/* Cuts the text where a stop text is complete: the first to end, of two the longer. */
static bool cut_at_stop(const request *r, buffer *text, size_t from)
{
    size_t best_end = SIZE_MAX;
    size_t best = 0;
    for (uint32_t i = 0; i < r->n_stops; i++) {
        const size_t n = strlen(r->stops[i]);
        const size_t at = buffer_find(text, from, r->stops[i], n);
        if (at < text->n && (at + n < best_end || (at + n == best_end && at < best))) {
            best_end = at + n;
            best = at;
        }
    }
    if (best_end == SIZE_MAX)
        return false;
    text->n = best;
    return true;
}

typedef struct progress {
    const request *r;
    bool is_shown;
    size_t n_shown; /* bytes of the text */
    answer *out;
} progress;

/* Takes what was added to the text; true if it has ended at a stop text. */
static bool take_text(progress *p, bool is_last)
{
    buffer *const text = &p->out->text;
    const bool is_stopped = cut_at_stop(p->r, text, p->n_shown);
    const size_t n_held = is_stopped || is_last ? 0 : held_bytes(p->r, text, p->n_shown);
    const size_t n_new = text->n - n_held - p->n_shown;
    if (p->is_shown)
        show(text->p + p->n_shown, n_new);
    p->n_shown += n_new;
    if (is_stopped)
        p->out->reason = "stop";
    return is_stopped;
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
    progress p = {r, is_shown, 0, out};
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
    if (strcmp(out->reason, "stop") != 0) {
        buffer_add(&out->text, room, qsf_decoder_flush(&decoder, room));
        (void)take_text(&p, true);
    }
    free(room);
}
