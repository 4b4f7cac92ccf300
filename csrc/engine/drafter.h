/* drafter.h - a session of a smaller model, which guesses the choices of a session's model. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "engine/session.h"

/* Guesses the token after the first n_tokens of the session's buffer. False: the text is too long
 * for the draft model, has tokens outside of its vocabulary, or the session was cancelled. Adds its
 * time to the chain. */
bool qsf_drafter_guess(qsf_session *s, uint32_t n_tokens, qsf_speculation_chain *chain,
                       qsf_guess *out);
