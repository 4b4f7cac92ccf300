/* prompt.h - a prompt or a conversation to token ids. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bytes_buffer.h"
#include "chat_form.h"
#include "qsf.h"

typedef struct token_list {
    uint32_t *ids; /* [n]; room for cap */
    size_t n;
    size_t cap;
} token_list;

void tokens_add(token_list *list, uint32_t id);

/* Adds the tokens of a text; flags as of qsf_tokenize. */
void tokens_add_text(token_list *list, const qsf_text *text, const char *p, size_t n,
                     uint32_t flags);

/* Messages of a conversation by turns: user, assistant, user; it ends with the user's. */
typedef struct conversation {
    const char *system; /* or NULL */
    buffer *messages;   /* [n_messages] */
    size_t n_messages;
} conversation;

void conversation_add(conversation *c, const char *text, size_t n);

/* Removes the first messages. */
void conversation_forget(conversation *c, size_t n_messages);

/* Adds the tokens of the prompt that asks for the next answer. Special tokens come from the form
 * only: in messages such texts are ordinary ones. */
void tokens_add_conversation(token_list *list, const qsf_text *text, const chat_form *form,
                             const conversation *c);
