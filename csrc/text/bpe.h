/* bpe.h - byte-pair encoding of one piece of text. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "text/sink.h"
#include "text/work.h"

/* Of two neighbouring tokens, those whose merge has the lowest rank are merged first, the leftmost
 * ones first among equals. Time O(n log n) in the piece's bytes; 28 bytes of memory for each. */
qsf_status qsf_bpe_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes piece, qsf_sink *out);
