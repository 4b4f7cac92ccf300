/* generate.c - the C API by itself: text in, text out.
 *
 * Usage: generate MODEL.qsf N_TOKENS PROMPT
 * Continues the prompt by up to N_TOKENS tokens, chosen greedily, and prints text as it comes.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qsf.h"

static int fail(const char *what)
{
    fprintf(stderr, "generate: %s: %s\n", what, qsf_error_detail());
    return 1;
}

/* A whole number, or -1. */
static long parse_number(const char *text)
{
    char *end;
    const long value = strtol(text, &end, 10);
    return *text != '\0' && *end == '\0' && value >= 0 ? value : -1;
}

/* Ids of the prompt, in memory that the caller frees; NULL after an error. */
static uint32_t *encode(const qsf_text *text, const char *prompt, size_t *n_ids)
{
    const uint32_t flags = QSF_TOKENIZE_PREFIX | QSF_TOKENIZE_SPECIAL;
    if (qsf_tokenize(text, prompt, strlen(prompt), flags, NULL, 0, n_ids) != QSF_OK)
        return NULL;
    uint32_t *const ids = malloc((*n_ids + 1) * sizeof *ids);
    if (ids != NULL &&
        qsf_tokenize(text, prompt, strlen(prompt), flags, ids, *n_ids, n_ids) == QSF_OK)
        return ids;
    free(ids);
    return NULL;
}

/* Chooses tokens and prints what of their text is complete; `out` [room_bytes]. */
static int stream(qsf_session *session, const qsf_text *text, uint32_t eos_id, long n_tokens,
                  char *out, size_t room_bytes)
{
    qsf_sampling how;
    qsf_sampling_default(&how);
    how.temperature = 0.0f;
    uint64_t random_state = 0;
    qsf_text_decoder decoder;
    qsf_decoder_init(text, 0, &decoder);
    for (long i = 0; i < n_tokens; i++) {
        uint32_t token;
        size_t n_bytes;
        if (qsf_session_sample(session, &how, NULL, 0, &random_state, &token) != QSF_OK)
            return fail("sampling");
        if (token == eos_id)
            break;
        if (qsf_decoder_push(text, &decoder, token, out, room_bytes, &n_bytes) != QSF_OK)
            return fail("decoding");
        fwrite(out, 1, n_bytes, stdout);
        fflush(stdout);
        if (i + 1 < n_tokens && qsf_session_step(session, token) != QSF_OK)
            return fail("step");
    }
    fwrite(out, 1, qsf_decoder_flush(&decoder, out), stdout);
    puts("");
    return 0;
}

static int generate(qsf_model *model, qsf_session *session, const qsf_text *text,
                    const char *prompt, long n_tokens)
{
    size_t n_prompt = 0;
    uint32_t *const ids = encode(text, prompt, &n_prompt);
    if (ids == NULL)
        return fail("prompt");
    qsf_status status = QSF_OK;
    /* One call evaluates one chunk, so that a long prompt can show progress here. */
    for (size_t n_done = 0; status == QSF_OK && n_done < n_prompt;)
        status = qsf_session_sync(session, ids, n_prompt, &n_done);
    free(ids);
    if (status != QSF_OK)
        return fail("prompt");

    qsf_model_facts model_facts;
    qsf_text_facts text_facts;
    qsf_model_info(model, &model_facts);
    qsf_text_info(text, &text_facts);
    char *const out = malloc((size_t)text_facts.room_bytes);
    if (out == NULL)
        return 1;
    printf("%s", prompt);
    const int exit_code =
        stream(session, text, model_facts.eos_id, n_tokens, out, (size_t)text_facts.room_bytes);
    free(out);
    return exit_code;
}

int main(int argc, char **argv)
{
    const long n_tokens = argc == 4 ? parse_number(argv[2]) : -1;
    if (n_tokens < 0) {
        fprintf(stderr, "usage: generate MODEL.qsf N_TOKENS PROMPT\n");
        return 2;
    }
    qsf_options options;
    qsf_options_default(&options); /* 200 MiB for the whole process, the vocabulary included */
    qsf_text *text = NULL;
    qsf_model *model = NULL;
    qsf_session *session = NULL;
    int exit_code;
    if (qsf_text_open(argv[1], &text) != QSF_OK)
        exit_code = fail("vocabulary");
    else if (qsf_model_open(argv[1], &options, &model) != QSF_OK)
        exit_code = fail("model");
    else if (qsf_session_create(model, &session) != QSF_OK)
        exit_code = fail("session");
    else
        exit_code = generate(model, session, text, argv[3], n_tokens);
    qsf_session_destroy(session);
    qsf_model_close(model);
    qsf_text_close(text);
    return exit_code;
}
