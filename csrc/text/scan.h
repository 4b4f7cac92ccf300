/* scan.h - the regular expressions with which tokenizers split texts, as functions.
 *
 * Each returns the match of Oniguruma for the expression above it in scan.c: the first
 * alternative that matches here, as long as its quantifiers allow. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "text/vocabulary.h"

/* Returns the end of the match that begins at p; NULL if there is none. p < end, valid UTF-8. */
typedef const unsigned char *qsf_scanner(const unsigned char *p, const unsigned char *end);

/* Returns NULL for steps without a regular expression. */
qsf_scanner *qsf_scanner_of(qsf_step_kind kind);
