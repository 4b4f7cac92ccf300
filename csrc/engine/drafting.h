/* drafting.h - evaluates drafts of the next tokens in the pass of the token before them.
 *
 * Call all functions under the model's lock. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/pass.h"

/* True if the token is already evaluated as the session's next one. */
bool qsf_drafting_has(const qsf_session *s, uint32_t token);

/* Appends the next draft, which qsf_drafting_has() has confirmed, to the session's tokens.
 * QSF_ERR_CANCELLED. */
qsf_status qsf_drafting_take(qsf_session *s);

/* Learns from the session's next token, before it is taken or evaluated. The n-gram table learns
 * the latest pass's predictions here, after its guesses were counted; if the token is not a
 * draft, the rows being dropped teach it too. */
void qsf_drafting_learn(qsf_session *s, uint32_t token);

/* Does what qsf_pass_run() does, and also evaluates drafts after the parts that allow them, each
 * with a row of logits: the most probable drafts of all parts, as long as they promise to save
 * time. */
qsf_status qsf_drafting_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w);
