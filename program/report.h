/* report.h - plans, files and answers as lines of text or as JSON. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "answer.h"

void print_plan(const qsf_plan *plan, bool is_json);
void print_facts(const qsf_model_facts *facts, bool is_json);
void print_answer_json(const opened *o, const answer *a, const token_list *tokens, uint64_t seed);

/* One line on standard error. */
void print_speed(const opened *o, const answer *a);
