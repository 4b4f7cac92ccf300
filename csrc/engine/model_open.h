/* model_open.h - opens a model: its options, its file, its plan, its memory. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"
#include "include/qsf.h"
#include "text/text.h"

/* For tests: the N-th allocation or read of open fails (negative: none does), and process_bytes
 * replaces the measured memory of the process (0: measure). */
typedef struct qsf_faults {
    int64_t grants_until_fault;
    int64_t reads_until_fault;
    uint64_t process_bytes;
} qsf_faults;

/* qsf_model_open with faults, which may be NULL. The options have been checked. */
qsf_status qsf_model_create(const char *path, const qsf_options *opt, const qsf_faults *faults,
                            qsf_model **out);

/* ---- the options ---- */

/* QSF_ERR_ARG names the option that is out of range. */
qsf_status qsf_options_check(const qsf_options *opt);

/* ---- which layers are skipped for speed (qsf_options.quality) ---- */

/* Of n layers, round((1 - quality) * n) are skipped: 0.9, 0.8 and 0.7 skip 10, 20 and 30 %. The
 * first two and the last two always run, so quality 0 skips all the others. The least important
 * layers are skipped first, by the importances of the file (docs/format.md); of equally important
 * ones the nearest to the middle of the model, then the first. So a smaller quality skips the
 * layers of a larger one, and more.
 *
 * The rest of the engine sees a skipped layer as one that the file does not have
 * (qsf_reader_leave_out). */

/* Sets the entries of is_skipped [n_layers of the header] that are skipped. QSF_ERR_ARG: quality is
 * below 1, but the file has no importances (all are equal) or the model has no layer that may be
 * skipped. */
qsf_status qsf_skip_layers(const qsf_reader *r, double quality, bool *is_skipped);

/* Fills in the plan's fields on skipped layers. */
void qsf_skip_describe(const qsf_reader *r, double quality, qsf_plan *plan);

/* ---- vocabularies ---- */

/* QSF_ERR_ARG with the first difference, unless all ids that both files have are the same
 * tokens. Needs the memory of both vocabularies meanwhile, unless they are equal byte for byte. */
qsf_status qsf_drafter_check_tokens(qsf_reader *model, qsf_reader *drafter);
