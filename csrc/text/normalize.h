/* normalize.h - NFC, NFKC, Prepend and Replace, as the tokenizer asks for them. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "text/work.h"

/* Applies the vocabulary's normalising steps to valid UTF-8. *out is `in` itself if they change
 * nothing; else it lies in a block of w until the next call. */
qsf_status qsf_normalize(const qsf_vocabulary *v, qsf_work *w, qsf_bytes in, qsf_bytes *out);
