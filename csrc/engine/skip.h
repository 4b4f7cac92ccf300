/* skip.h - which layers are left out for speed (qsf_options.quality).
 *
 * Of n layers, round((1 - quality) * n) are skipped: 0.9, 0.8 and 0.7 skip 10, 20 and 30 %. The
 * first two and the last two always run, so quality 0 skips all the others. The least important
 * go first, by the importance that the file has for each (docs/format.md); of equally important
 * ones that nearest to the middle of the model, and of two equally near the first. A smaller
 * quality thus skips the layers of a larger one and more.
 *
 * To the rest of the engine a skipped layer is one that the file does not have
 * (qsf_reader_leave_out): plans, the ring, KV caches and memory pressure know nothing of it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_SKIP_H
#define QSF_ENGINE_SKIP_H

#include "format/records.h"

/* Leaves layers out of the reader. QSF_ERR_ARG for a quality below 1 where the file has no
 * importances, which is to say that all are equal, or no layer that may be skipped. */
qsf_status qsf_skip_layers(qsf_reader *r, double quality);

/* Fills in what the plan says of skipped layers. */
void qsf_skip_describe(const qsf_reader *r, double quality, qsf_plan *plan);

#endif
