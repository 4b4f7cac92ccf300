/* arguments.h - the command line: options with the names and meanings of the Python command. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "qsf.h"

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
