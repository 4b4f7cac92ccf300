/* wordpiece.h - the tokens of a word, longest first. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "text/sink.h"
#include "text/work.h"

/* All tokens of a word but the first have the prefix. A word of more than 100 characters, or one
 * that tokens do not cover, is the unknown token. */
qsf_status qsf_wordpiece_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes word,
                                qsf_sink *out);
