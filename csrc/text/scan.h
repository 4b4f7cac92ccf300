/* scan.h - the regular expressions by which tokenizers split texts, as functions.
 *
 * Each matches what Oniguruma matches with the expression above it in scan.c: at this place, the
 * first alternative that does, as long as its quantifiers make it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TEXT_SCAN_H
#define QSF_TEXT_SCAN_H

#include "text/vocabulary.h"

/* Where the match that begins at p ends; NULL where none does. p < end, valid UTF-8. */
typedef const unsigned char *qsf_scanner(const unsigned char *p, const unsigned char *end);

/* NULL for steps without a regular expression. */
qsf_scanner *qsf_scanner_of(qsf_step_kind kind);

#endif
