/* chat_form.c - what a file recommends. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "chat_form.h"

#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "stop.h"

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
}
