/* program.c - qsf as one static program: text from a model, without Python.
 *
 * It uses the public C API only. Options have the names of the Python command, and the text is the
 * same. What it lacks: conversion, the server, constraints, sessions as files.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static qsf_session *running;
static volatile sig_atomic_t is_interrupted;

static void interrupt(int number)
{
    signal(number, SIG_DFL);
    is_interrupted = 1;
    qsf_session_cancel(running);
}

void stop_on_interrupt(qsf_session *session)
{
    running = session;
    terminal_on_interrupt(interrupt);
}

bool was_interrupted(void)
{
    return is_interrupted != 0;
}

void fail(const char *what)
{
    fflush(stdout);
    fprintf(stderr, "qsf: %s\n", what);
    exit(1);
}

void check(qsf_status status)
{
    if (status == QSF_OK)
        return;
    if (status == QSF_ERR_CANCELLED && was_interrupted()) {
        puts("");
        exit(130);
    }
    fail(qsf_error_detail());
}

/* ---- commands ---- */

#define RESERVE_BYTES (4u << 20)
#define MAX_PROMPT_BYTES (4u << 20)

static void open_model(const request *r, opened *o)
{
    *o = (opened){0};
    check(qsf_text_open(r->model, &o->text));
    check(qsf_model_open(r->model, &r->opening, &o->model));
    check(qsf_session_create(o->model, &o->session));
    qsf_model_info(o->model, &o->facts);
    qsf_text_info(o->text, &o->text_facts);
    chat_form_read(o->model, r, &o->form, &o->how);
    stop_on_interrupt(o->session);
    if (o->form.has_template && !o->form.is_known && !r->is_raw)
        fprintf(stderr, "qsf: the file's chat template has no fixed form (or an older converter "
                        "wrote the file): messages are joined as plain text\n");
    if (r->system != NULL && !o->form.has_system)
        fail("--system needs a chat form with a place for it, and the file has none");
}

static void close_model(opened *o)
{
    stop_on_interrupt(NULL);
    chat_form_free(&o->form);
    qsf_session_destroy(o->session);
    qsf_model_close(o->model);
    qsf_text_close(o->text);
}

/* The whole of a stream without one line end at its end. */
static void read_all(FILE *file, const char *name, buffer *out)
{
    if (file == NULL) {
        perror(name);
        exit(1);
    }
    for (int c = getc(file); c != EOF && out->n <= MAX_PROMPT_BYTES; c = getc(file)) {
        const char byte = (char)c;
        buffer_add(out, &byte, 1);
    }
    if (out->n > MAX_PROMPT_BYTES)
        fail("the prompt is too long: more than 4 MB");
    if (out->n >= 3 && memcmp(out->p, "\xEF\xBB\xBF", 3) == 0) /* a byte order mark */
        buffer_replace(out, 0, 3, "", 0);
    if (out->n > 0 && out->p[out->n - 1] == '\n')
        out->n--;
    if (out->n > 0 && out->p[out->n - 1] == '\r')
        out->n--;
    if (out->n == 0)
        fail("the prompt is empty: give --prompt TEXT, --prompt-file FILE or text on standard "
             "input");
}

static uint64_t seed_of(const request *r)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return r->has_seed ? r->seed : ((uint64_t)now.tv_sec << 20 ^ (uint64_t)now.tv_nsec) >> 1;
}

static int run(request *r)
{
    opened o;
    buffer prompt = {0};
    if (r->prompt != NULL)
        buffer_add_text(&prompt, r->prompt);
    else if (r->prompt_file == NULL || strcmp(r->prompt_file, "-") == 0)
        read_all(stdin, "standard input", &prompt);
    else
        read_all(fopen(r->prompt_file, "rb"), r->prompt_file, &prompt);
    open_model(r, &o);
    const bool is_answer = !r->is_raw && o.form.is_known;
    if (is_answer && !r->has_max_tokens)
        r->max_tokens = UINT32_MAX;
    token_list tokens = {0};
    conversation c = {.system = r->system};
    if (is_answer) {
        conversation_add(&c, prompt.p, prompt.n);
        tokens_add_conversation(&tokens, o.text, &o.form, &c);
        buffer_free(&c.messages[0]);
        free(c.messages);
    } else {
        const uint32_t flags = r->no_special ? 0 : QSF_TOKENIZE_SPECIAL;
        tokens_add_text(&tokens, o.text, prompt.p, prompt.n, flags | QSF_TOKENIZE_PREFIX);
    }
    const uint64_t seed = seed_of(r);
    answer a;
    answer_prompt(&o, r, seed, is_answer, !r->is_json, &tokens, &a);
    if (r->is_json)
        print_answer_json(&o, &a, &tokens, seed);
    else
        puts("");
    if (!r->is_json && !r->is_quiet)
        print_speed(&o, &a);
    const bool is_cancelled = strcmp(a.reason, "cancelled") == 0;
    buffer_free(&a.text);
    buffer_free(&prompt);
    free(tokens.ids);
    close_model(&o);
    return is_cancelled ? 130 : 0;
}

/* The next line without its end, or its beginning if it is too long for any context; false at the
 * end of the input. */
static bool read_line(buffer *line)
{
    int c = getchar();
    for (; c != EOF && c != '\n'; c = getchar()) {
        const char byte = (char)c;
        if (line->n <= MAX_PROMPT_BYTES)
            buffer_add(line, &byte, 1);
    }
    while (line->n > 0 && line->p[line->n - 1] == '\r')
        line->n--;
    return c != EOF || line->n > 0;
}

static bool ends_chat(const buffer *line)
{
    static const char *const WORDS[] = {"/exit", "/quit", "/bye"};
    for (size_t i = 0; i < 3; i++)
        if (line->n == strlen(WORDS[i]) && memcmp(line->p, WORDS[i], line->n) == 0)
            return true;
    return false;
}

/* Adds the user's message, and forgets the oldest turns until the prompt fits the context. Says why
 * and returns false if the message alone does not fit, or is not UTF-8. */
static bool begin_turn(const opened *o, conversation *c, const buffer *line, token_list *tokens)
{
    size_t n_ids;
    if (qsf_tokenize(o->text, line->p, line->n, 0, NULL, 0, &n_ids) != QSF_OK) {
        fprintf(stderr, "(the line is left out: %s)\n", qsf_error_detail());
        return false;
    }
    const size_t most = o->facts.plan.ctx_tokens;
    size_t n_forgotten = 0;
    conversation_add(c, line->p, line->n);
    conversation kept = *c; /* what follows the forgotten turns */
    tokens_add_conversation(tokens, o->text, &o->form, &kept);
    for (; tokens->n > most && kept.n_messages > 2; n_forgotten++) {
        kept.messages += 2;
        kept.n_messages -= 2;
        tokens->n = 0;
        tokens_add_conversation(tokens, o->text, &o->form, &kept);
    }
    if (tokens->n > most) {
        fprintf(stderr, "(the line is left out: it takes %zu tokens, the context has %zu)\n",
                tokens->n, most);
        buffer_free(&c->messages[--c->n_messages]);
        return false;
    }
    if (n_forgotten > 0)
        fprintf(stderr, "(the context was full: the oldest %zu turn%s forgotten)\n", n_forgotten,
                n_forgotten == 1 ? " is" : "s are");
    conversation_forget(c, 2 * n_forgotten);
    return true;
}

static int chat(request *r)
{
    opened o;
    open_model(r, &o);
    if (!o.form.has_template)
        fprintf(stderr, "This file has no chat template: your lines and the answers are joined as "
                        "plain text, which the model continues.\n");
    if (o.form.is_known && !r->has_max_tokens)
        r->max_tokens = UINT32_MAX;
    conversation c = {.system = r->system};
    const bool is_terminal = isatty(0) != 0;
    uint64_t seed = seed_of(r);
    buffer line = {0};
    while (!was_interrupted()) {
        line.n = 0;
        if (is_terminal)
            fputs("> ", stderr);
        if (!read_line(&line) || ends_chat(&line))
            break;
        token_list tokens = {0};
        if (line.n == 0 || !begin_turn(&o, &c, &line, &tokens)) {
            free(tokens.ids);
            continue;
        }
        answer a;
        answer_prompt(&o, r, seed, o.form.is_known, true, &tokens, &a);
        puts("");
        if (strcmp(a.reason, "context") == 0)
            fputs("(cut: the context is full; the next message forgets the oldest turns)\n",
                  stderr);
        if (is_terminal && !r->is_quiet)
            print_speed(&o, &a);
        conversation_add(&c, a.text.p, a.text.n);
        if (!r->has_seed)
            seed++;
        buffer_free(&a.text);
        free(tokens.ids);
    }
    for (size_t i = 0; i < c.n_messages; i++)
        buffer_free(&c.messages[i]);
    free(c.messages);
    buffer_free(&line);
    close_model(&o);
    return was_interrupted() ? 130 : 0;
}

static int plan(const request *r)
{
    qsf_plan made;
    qsf_text *text;
    check(qsf_text_open(r->model, &text)); /* it is memory of the process */
    const qsf_status status = qsf_model_plan(r->model, &r->opening, &made);
    if (status != QSF_OK && status != QSF_ERR_NOMEM)
        check(status);
    print_plan(&made, r->is_json);
    qsf_text_close(text);
    check(status);
    return 0;
}

static int inspect(const request *r)
{
    qsf_options options = r->opening;
    options.budget_bytes = QSF_BUDGET_AUTO;
    options.ctx_tokens = 32;
    qsf_model *model;
    qsf_model_facts facts;
    check(qsf_model_open(r->model, &options, &model));
    qsf_model_info(model, &facts);
    print_facts(&facts, r->is_json);
    qsf_model_close(model);
    return 0;
}

int main(int argc, char **argv)
{
    request r;
    terminal_begin(&argc, &argv);
    parse_arguments(argc, argv, &r);
    r.opening.reserve_bytes = RESERVE_BYTES;
    if (r.is_plan || strcmp(r.command, "plan") == 0)
        return plan(&r);
    if (strcmp(r.command, "inspect") == 0)
        return inspect(&r);
    if (strcmp(r.command, "run") == 0)
        return run(&r);
    if (strcmp(r.command, "chat") == 0)
        return chat(&r);
    check(qsf_file_verify(r.model));
    puts(r.is_json ? "{\"is_whole\": true}" : "every byte is as it was written");
    return 0;
}
