/* drafting.h - guesses of the next tokens in the pass of the token before them.
 *
 * Call all of it under the model's lock.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_DRAFTING_H
#define QSF_ENGINE_DRAFTING_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/pass.h"

/* True if the token is evaluated already, as the session's next. */
bool qsf_drafting_has(const qsf_session *s, uint32_t token);

/* Appends the next draft, which qsf_drafting_has() has confirmed, to the session's tokens.
 * QSF_ERR_CANCELLED. */
qsf_status qsf_drafting_take(qsf_session *s);

/* Learns from the token that is the session's next: before it is taken or evaluated. What the
 * latest pass found likeliest teaches only then, after the guesses of it were counted; if the token
 * is not ahead, so do the rows that are dropped. */
void qsf_drafting_learn(qsf_session *s, uint32_t token);

/* Does what qsf_pass_run() does, and evaluates guesses beside the parts that may have drafts, each
 * with a row of logits: the likeliest of all parts, as far as they promise to save time. */
qsf_status qsf_drafting_run(qsf_model *m, qsf_pass_part *parts, uint32_t n_parts, qsf_stopwatch *w);

#endif
