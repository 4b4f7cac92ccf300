/* text_open.h - a vocabulary from an open file. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"
#include "text/text.h"

/* QSF_ERR_ARG with the first difference, unless all ids that both files have are the same
 * tokens. Needs the memory of both vocabularies meanwhile, unless they are equal byte for byte. */
qsf_status qsf_drafter_check_tokens(qsf_reader *model, qsf_reader *drafter);
