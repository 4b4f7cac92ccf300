/* encode.h - a text to token ids. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "text/sink.h"
#include "text/work.h"

/* `text` is valid UTF-8. Without has_special, names of special tokens are ordinary text. */
qsf_status qsf_text_encode(const qsf_vocabulary *v, qsf_work *w, qsf_bytes text, bool has_special,
                           qsf_sink *out);
