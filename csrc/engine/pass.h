/* pass.h - tokens of one or many sessions in one pass over the weights. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "engine/model.h"
#include "engine/session_buffers.h"

/* QSF_ERR_ARG: n_tokens exceed the context, or one is outside the vocabulary. */
qsf_status qsf_pass_check_tokens(const qsf_model *m, const uint32_t *tokens, size_t n_tokens);

/* Evaluates the tokens of all parts; call it under the model's lock, with a stopwatch that was
 * started. If the pass succeeded and the session was not cancelled, a part's session receives the
 * part's tokens, and the last row as its logits; each part has a status then. After an error of
 * the whole pass no session holds other tokens. Parts with rows: at most logits_rows in all, or
 * only one part. */
qsf_status qsf_pass_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w);

/* Adds n / n_all of the stopwatch's phases to the session's, after ending its last lap. */
void qsf_pass_count_phases(qsf_session *s, qsf_stopwatch *w, uint64_t n, uint64_t n_all);
