/* prompt.c - what a file recommends for chats, and a prompt or a conversation to token ids. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <stdlib.h>
#include <string.h>

static bool text_member(json object, const char *name, buffer *out)
{
    json value;
    return json_member(object, name, &value) && json_text(value, out);
}

static void read_form(json chat, chat_form *form)
{
    json value;
    json system;
    form->has_template = json_member(chat, "chat_template", &value) && !json_is(value, "null");
    if (!form->has_template || !json_member(chat, "form", &value))
        return;
    form->is_known =
        text_member(value, "begin", &form->begin) && text_member(value, "answer", &form->answer) &&
        text_member(value, "next", &form->next) && text_member(value, "ask", &form->ask);
    json part;
    form->has_system = json_member(value, "system", &system) && json_element(system, 0, &part) &&
                       json_text(part, &form->system_before) && json_element(system, 1, &part) &&
                       json_text(part, &form->system_after);
    form->is_trimmed = json_member(value, "trimmed", &part) && json_is(part, "true");
}

static void add_end(chat_form *form, json value)
{
    double id;
    if (json_number(value, &id) && id >= 0 && id < QSF_TOKEN_NONE && form->n_ends < MAX_ENDS)
        form->ends[form->n_ends++] = (uint32_t)id;
}

static void read_ends(json generation, chat_form *form)
{
    json ids;
    json id;
    if (!json_member(generation, "eos_token_id", &ids))
        return;
    add_end(form, ids);
    for (size_t i = 0; json_element(ids, i, &id); i++)
        add_end(form, id);
}

static void read_stops(json generation, chat_form *form)
{
    json texts;
    json text;
    if (!json_member(generation, "stop_strings", &texts))
        return;
    if (json_is(texts, "null"))
        return;
    const bool is_list = *texts.p == '['; /* perhaps empty */
    for (size_t i = 0; is_list ? json_element(texts, i, &text) : i == 0; i++) {
        buffer *const stop = &form->stops[form->n_stops];
        if (i == MAX_STOPS || !json_text(is_list ? text : texts, stop) || stop->n == 0 ||
            strlen(stop->p) != stop->n)
            fail("the file's stop_strings are not up to 16 texts");
        form->n_stops++;
    }
}

/* As asked for, else as the file recommends, else as it is. */
static double choose(double asked, json generation, const char *name, double otherwise)
{
    json value;
    double number;
    if (asked >= 0)
        return asked;
    return json_member(generation, name, &value) && json_number(value, &number) ? number
                                                                                : otherwise;
}

void chat_form_read(qsf_model *model, const request *r, chat_form *form, qsf_sampling *how)
{
    *form = (chat_form){0};
    const uint64_t n_bytes = qsf_model_section_bytes(model, "CHAT");
    char *const text = grown(NULL, (size_t)n_bytes + 1);
    if (n_bytes > 0)
        check(qsf_model_section(model, "CHAT", text, n_bytes));
    text[n_bytes] = '\0';
    const json chat = {text, text + n_bytes};
    json generation = {text, text};
    json sample;
    (void)json_member(chat, "generation", &generation);
    read_form(chat, form);
    read_ends(generation, form);
    read_stops(generation, form);
    const bool is_greedy =
        json_member(generation, "do_sample", &sample) && json_is(sample, "false");
    qsf_sampling_default(how);
    const double most = is_greedy && r->temperature < 0 ? 0 : r->temperature;
    how->temperature = (float)choose(most, generation, "temperature", 0.7);
    how->top_p = (float)choose(r->top_p, generation, "top_p", 0.9);
    how->top_k = (uint32_t)choose(r->top_k, generation, "top_k", 40);
    how->min_p = (float)choose(r->min_p, generation, "min_p", 0);
    how->repetition_penalty =
        (float)choose(r->repetition_penalty, generation, "repetition_penalty", 1);
    free(text);
    qsf_model_facts facts;
    qsf_model_info(model, &facts);
    if (facts.eos_id != QSF_TOKEN_NONE && form->n_ends < MAX_ENDS)
        form->ends[form->n_ends++] = facts.eos_id;
}

void chat_form_free(chat_form *form)
{
    buffer *const texts[] = {&form->begin,  &form->system_before, &form->system_after,
                             &form->answer, &form->next,          &form->ask};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        buffer_free(texts[i]);
    for (uint32_t i = 0; i < form->n_stops; i++)
        buffer_free(&form->stops[i]);
}

/* ---- tokens ---- */

#define SEAM "\xEF\xB7\x90" /* U+FDD0, a noncharacter: texts are cut here */

void tokens_add(token_list *list, uint32_t id)
{
    if (list->n == list->cap) {
        list->cap = 2 * list->cap + 64;
        list->ids = grown(list->ids, list->cap * sizeof *list->ids);
    }
    list->ids[list->n++] = id;
}

void tokens_add_text(token_list *list, const qsf_text *text, const char *p, size_t n,
                     uint32_t flags)
{
    size_t n_ids;
    check(qsf_tokenize(text, p, n, flags, NULL, 0, &n_ids));
    if (list->n + n_ids > list->cap) {
        list->cap = 2 * (list->n + n_ids);
        list->ids = grown(list->ids, list->cap * sizeof *list->ids);
    }
    check(qsf_tokenize(text, p, n, flags, list->ids + list->n, n_ids, &n_ids));
    list->n += n_ids;
}

void conversation_add(conversation *c, const char *text, size_t n)
{
    c->messages = grown(c->messages, (c->n_messages + 1) * sizeof *c->messages);
    c->messages[c->n_messages] = (buffer){0};
    buffer_add(&c->messages[c->n_messages++], text, n);
}

void conversation_forget(conversation *c, size_t n_messages)
{
    for (size_t i = 0; i < n_messages; i++)
        buffer_free(&c->messages[i]);
    c->n_messages -= n_messages;
    memmove(c->messages, c->messages + n_messages, c->n_messages * sizeof *c->messages);
}

static size_t character_bytes(const char *p)
{
    const unsigned char c = (unsigned char)*p;
    return c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

static size_t count_characters(const buffer *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->n; i++)
        n += ((unsigned char)b->p[i] & 0xC0) != 0x80;
    return n;
}

/* Longest first, else by bytes. */
static int compare_names(const void *a, const void *b)
{
    const buffer *const x = a;
    const buffer *const y = b;
    const size_t n_x = count_characters(x);
    const size_t n_y = count_characters(y);
    return n_x != n_y ? (n_x < n_y ? 1 : -1) : strcmp(x->p, y->p);
}

/* Names of the special tokens, in memory of the caller. */
static buffer *special_names(const qsf_text *text, size_t *n_names)
{
    const size_t n = qsf_text_special(text, NULL, 0);
    uint32_t *const ids = grown(NULL, (n + 1) * sizeof *ids);
    buffer *const names = grown(NULL, (n + 1) * sizeof *names);
    (void)qsf_text_special(text, ids, n);
    *n_names = 0;
    for (size_t i = 0; i < n; i++) {
        char name[512];
        const size_t n_bytes = qsf_token_name(text, ids[i], name, sizeof name);
        if (n_bytes == 0 || n_bytes > sizeof name)
            continue;
        names[*n_names] = (buffer){0};
        buffer_add(&names[(*n_names)++], name, n_bytes);
    }
    free(ids);
    qsort(names, *n_names, sizeof *names, compare_names);
    return names;
}

/* Puts a seam after the first character of each name of a special token, and removes the seams
 * that the message had. */
static void protect(buffer *message, const buffer *names, size_t n_names)
{
    for (size_t at = 0; (at = buffer_find(message, at, SEAM, 3)) < message->n;)
        buffer_replace(message, at, 3, "", 0);
    for (size_t i = 0; i < n_names; i++) {
        const buffer *const name = &names[i];
        const size_t n_first = character_bytes(name->p);
        if (name->n <= n_first || buffer_find(name, 0, SEAM, 3) < name->n)
            continue;
        for (size_t at = 0; (at = buffer_find(message, at, name->p, name->n)) < message->n;
             at += name->n + 3)
            buffer_replace(message, at + n_first, 0, SEAM, 3);
    }
}

static void add_message(buffer *out, const char *p, size_t n, const chat_form *form,
                        const buffer *names, size_t n_names)
{
    static const char SPACES[] = " \t\n\r\v\f";
    while (form->is_trimmed && n > 0 && strchr(SPACES, p[n - 1]) != NULL)
        n--;
    while (form->is_trimmed && n > 0 && strchr(SPACES, *p) != NULL) {
        p++;
        n--;
    }
    buffer message = {0};
    buffer_add(&message, p, n);
    protect(&message, names, n_names);
    buffer_add(out, message.p, message.n);
    buffer_free(&message);
}

/* The prompt with seams. Without a form the messages are joined by line ends. */
static void join(const chat_form *form, const conversation *c, const buffer *names, size_t n_names,
                 buffer *out)
{
    const bool has_system = c->system != NULL && form->is_known;
    const buffer *const begin = has_system ? &form->system_before : &form->begin;
    if (form->is_known)
        buffer_add(out, begin->p, begin->n);
    if (has_system) {
        add_message(out, c->system, strlen(c->system), form, names, n_names);
        buffer_add(out, form->system_after.p, form->system_after.n);
    }
    for (size_t i = 0; i < c->n_messages; i++) {
        add_message(out, c->messages[i].p, c->messages[i].n, form, names, n_names);
        const bool is_last = i + 1 == c->n_messages;
        const buffer *const seam = is_last ? &form->ask : i % 2 == 0 ? &form->answer : &form->next;
        if (form->is_known)
            buffer_add(out, seam->p, seam->n);
        else if (!is_last)
            buffer_add(out, "\n", 1);
    }
}

void tokens_add_conversation(token_list *list, const qsf_text *text, const chat_form *form,
                             const conversation *c)
{
    size_t n_names;
    buffer *const names = special_names(text, &n_names);
    buffer joined = {0};
    join(form, c, names, n_names, &joined);
    uint32_t flags = QSF_TOKENIZE_SPECIAL | (form->is_known ? 0 : QSF_TOKENIZE_PREFIX);
    for (size_t at = 0; at <= joined.n;) {
        const size_t end = buffer_find(&joined, at, SEAM, 3);
        tokens_add_text(list, text, joined.p + at, end - at, flags);
        flags = QSF_TOKENIZE_SPECIAL;
        at = end + 3;
    }
    buffer_free(&joined);
    for (size_t i = 0; i < n_names; i++)
        buffer_free(&names[i]);
    free(names);
}
