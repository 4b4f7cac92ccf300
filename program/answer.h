/* answer.h - one answer: tokens, their text as it comes, why it ends. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "arguments.h"
#include "chat_form.h"
#include "prompt.h"
#include "qsf.h"

typedef struct opened {
    qsf_text *text;
    qsf_model *model;
    qsf_session *session;
    qsf_model_facts facts;
    qsf_text_facts text_facts;
    chat_form form;
    qsf_sampling how;
} opened;

typedef struct answer {
    buffer text;
    size_t n_prompt;
    size_t n_evaluated; /* of the prompt: those that the session did not hold */
    size_t n_generated; /* an end token included */
    double prompt_seconds;
    double first_seconds;
    double step_seconds;
    const char *reason; /* "end", "stop", "length", "context", "cancelled" */
} answer;

/* Continues tokens, which get those of the answer, and prints the text as it comes if
 * `is_shown`. begins_text: the answer is a text of its own. */
void answer_prompt(opened *o, const request *r, uint64_t seed, bool begins_text, bool is_shown,
                   token_list *tokens, answer *out);
