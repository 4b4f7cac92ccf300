/* generate.c - the C API by itself: token ids in, token ids out.
 *
 * Usage: generate MODEL.qsf N_TOKENS ID [ID ...]
 * Evaluates the given ids, then prints N_TOKENS more, chosen greedily, one a line.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

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

static int generate(qsf_session *session, const uint32_t *prompt, size_t n_prompt, long n_tokens)
{
    /* One call evaluates one chunk, so that a long prompt can show progress here. */
    size_t n_done = 0;
    while (n_done < n_prompt)
        if (qsf_session_sync(session, prompt, n_prompt, &n_done) != QSF_OK)
            return fail("prompt");

    qsf_sampling how;
    qsf_sampling_default(&how);
    how.temperature = 0.0f;
    uint64_t random_state = 0;
    for (long i = 0; i < n_tokens; i++) {
        uint32_t token;
        if (qsf_session_sample(session, &how, NULL, 0, &random_state, &token) != QSF_OK)
            return fail("sampling");
        printf("%u\n", (unsigned)token);
        if (i + 1 < n_tokens && qsf_session_step(session, token) != QSF_OK)
            return fail("step");
    }
    return 0;
}

int main(int argc, char **argv)
{
    const long n_tokens = argc >= 4 ? parse_number(argv[2]) : -1;
    if (n_tokens < 0) {
        fprintf(stderr, "usage: generate MODEL.qsf N_TOKENS ID [ID ...]\n");
        return 2;
    }
    const size_t n_prompt = (size_t)argc - 3;
    uint32_t *const prompt = malloc(n_prompt * sizeof *prompt);
    if (prompt == NULL)
        return 1;
    for (size_t i = 0; i < n_prompt; i++) {
        const long id = parse_number(argv[3 + i]);
        prompt[i] = id < 0 ? QSF_TOKEN_NONE : (uint32_t)id;
    }

    qsf_options options;
    qsf_options_default(&options); /* 200 MiB for the whole process */
    qsf_model *model = NULL;
    qsf_session *session = NULL;
    int exit_code;
    if (qsf_model_open(argv[1], &options, &model) != QSF_OK)
        exit_code = fail("open");
    else if (qsf_session_create(model, &session) != QSF_OK)
        exit_code = fail("session");
    else
        exit_code = generate(session, prompt, n_prompt, n_tokens);
    qsf_session_destroy(session);
    qsf_model_close(model);
    free(prompt);
    return exit_code;
}
