/* program.h - the program `qsf` without Python: what its files share. It sees qsf.h only.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "qsf.h"

/* ---- what the system does to a program's arguments, streams and Ctrl-C ---- */

/* First of all: from then on arguments, names of files and standard streams are UTF-8, byte for
 * byte. */
void terminal_begin(int *argc, char ***argv);

/* From now on Ctrl-C calls it, and ends a read that waits. */
void terminal_on_interrupt(void (*handler)(int));

/* ---- how the program ends: errors of the engine, and Ctrl-C ---- */

/* Ends the program with one line and exit code 1 unless the status is QSF_OK; with 130 after
 * Ctrl-C. */
void check(qsf_status status);

/* Prints one line of an error and ends the program with exit code 1. */
_Noreturn void fail(const char *what);

/* From now on Ctrl-C cancels what this session does; a second one ends the program. */
void stop_on_interrupt(qsf_session *session);
bool was_interrupted(void);

/* ---- bytes that grow; memory of the program, not of the engine ---- */

typedef struct buffer {
    char *p; /* ends with a zero, which n does not count; NULL while nothing was added */
    size_t n;
    size_t cap;
} buffer;

/* Ends the program with one line and exit code 1 where memory is missing. */
void buffer_add(buffer *b, const char *p, size_t n);
void buffer_add_text(buffer *b, const char *text);
void buffer_free(buffer *b);

/* Puts `by` [n_by] in the place of n_old bytes at `at`. */
void buffer_replace(buffer *b, size_t at, size_t n_old, const char *by, size_t n_by);

/* Position of `what` [n_what] at or after `from`; b->n if there is none. */
size_t buffer_find(const buffer *b, size_t from, const char *what, size_t n_what);

/* Memory or the end of the program. */
void *grown(void *p, size_t n_bytes);

/* ---- values of a JSON text without copies, and texts as JSON ---- */

/* The beginning of a value in a text that ends at `end`. What is no JSON has no members. */
typedef struct json {
    const char *p;
    const char *end;
} json;

/* Finds a member of an object, or element idx of a list. */
bool json_member(json object, const char *name, json *out);
bool json_element(json list, size_t idx, json *out);

/* Adds the text of a string to `out`; false for every other value. */
bool json_text(json value, buffer *out);
bool json_number(json value, double *out);
bool json_is(json value, const char *word); /* "true", "false", "null" */

/* Adds `text` [n] with its quotes; characters that could steer a terminal are escaped. */
void json_add_text(buffer *out, const char *text, size_t n);

/* ---- the command line: options with the names and meanings of the Python command ---- */

#define MAX_STOPS 16

typedef struct request {
    const char *command; /* "run", "chat", "plan", "inspect" or "verify" */
    const char *model;
    const char *prompt; /* or NULL */
    const char *prompt_file;
    const char *system;
    const char *stops[MAX_STOPS];
    uint32_t n_stops;
    bool is_raw;
    bool no_special;
    bool is_json;
    bool is_quiet;
    bool is_plan;
    bool has_max_tokens;
    bool has_seed;
    uint32_t max_tokens;
    uint64_t seed;
    double temperature; /* this and the next four: below 0 if the file decides */
    double top_p;
    double top_k;
    double min_p;
    double repetition_penalty;
    qsf_options opening;
} request;

/* Fills *out. After an error, or after --help and --version, the program ends. */
void parse_arguments(int argc, char **argv, request *out);

/* ---- what a file recommends: its form of a chat, how to choose tokens, where to end ---- */

/* The form is what the converter made of the file's chat template (docs/format.md, section CHAT).
 */
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
    buffer stops[MAX_STOPS]; /* texts that end one */
    uint32_t n_stops;
} chat_form;

/* Reads the section CHAT. What `r` leaves to the file is set in *how. Ends the program on errors.
 */
void chat_form_read(qsf_model *model, const request *r, chat_form *form, qsf_sampling *how);
void chat_form_free(chat_form *form);

/* ---- a prompt or a conversation to token ids ---- */

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

/* ---- one answer: tokens, their text as it comes, why it ends ---- */

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

/* ---- plans, files and answers as lines of text or as JSON ---- */

void print_plan(const qsf_plan *plan, bool is_json);
void print_facts(const qsf_model_facts *facts, bool is_json);
void print_answer_json(const opened *o, const answer *a, const token_list *tokens, uint64_t seed);

/* One line on standard error. */
void print_speed(const opened *o, const answer *a);
