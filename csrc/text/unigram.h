/* unigram.h - the most probable tokens of one piece of text. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "text/sink.h"
#include "text/work.h"

/* Maximises the sum of scores; time O(n) times the longest token, 16 bytes of memory for each
 * byte. */
qsf_status qsf_unigram_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes piece, qsf_sink *out);
