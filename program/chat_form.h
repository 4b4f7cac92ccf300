/* chat_form.h - what a file recommends: its form of a chat, how to choose tokens, where to end.
 *
 * The form is what the converter made of the file's chat template (docs/format.md, section CHAT).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "arguments.h"
#include "bytes_buffer.h"
#include "qsf.h"

#define MAX_ENDS 32

/* Texts between messages; a conversation is begin, user, answer, assistant, next, user, ask. */
typedef struct chat_form {
    bool has_template; /* the file is for chats */
    bool is_known;     /* and has the texts below */
    bool has_system;   /* then system_before, the system's text, system_after in place of begin */
    bool is_trimmed;   /* messages are without spaces around them */
    buffer begin;
    buffer system_before;
    buffer system_after;
    buffer answer;
    buffer next;
    buffer ask;
    uint32_t ends[MAX_ENDS]; /* tokens that end a text */
    uint32_t n_ends;
} chat_form;

/* Reads the section CHAT. What `r` leaves to the file is set in *how. Ends the program on errors.
 */
void chat_form_read(qsf_model *model, const request *r, chat_form *form, qsf_sampling *how);
void chat_form_free(chat_form *form);
