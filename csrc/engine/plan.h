/* plan.h - decides, before anything is allocated, where the memory of a model goes.
 *
 * Sizes come from the same layout functions that later lay the real blocks out, run on
 * a measuring arena, so the plan and the allocation cannot disagree (draft.h). When memory is
 * short (ceiling.h): fewer resident units (residence.h); then smaller prompt chunks, a shorter
 * context and a smaller ring by turns, what was asked for apart; then 2 bits in the KV cache
 * (unless its type was asked for); then a refusal that says what would do. docs/memory.md has
 * the reasons.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_PLAN_H
#define QSF_ENGINE_PLAN_H

#include <stdbool.h>

#include "engine/draft.h"

/* Fills *plan and is_resident [n_units]. QSF_ERR_NOMEM with *plan filled for the least
 * memory that would do. QSF_ERR_ARG: a context longer than the model's. */
qsf_status qsf_plan_make(const qsf_plan_input *in, qsf_plan *plan, bool *is_resident);

#endif
