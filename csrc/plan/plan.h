/* plan.h - decides, before anything is allocated, where the memory of a model goes.
 *
 * The layout functions that later lay out the real allocations compute the sizes, so the plan and
 * the allocations agree (candidate.h). If memory is short (ceiling.h), the plan reduces, in this
 * order: resident units (residence.h); then the prompt chunk, the context and the ring in turns.
 * It never changes a number that the caller has set. If that is not enough, the error names a
 * budget that would work. docs/memory.md has the reasons.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "plan/candidate.h"

/* Fills *plan and is_resident [n_stream_units of the reader]. QSF_ERR_NOMEM: *plan is the smallest
 * possible plan. QSF_ERR_ARG: the context is longer than the model allows. */
qsf_status qsf_plan_make(const qsf_plan_input *in, qsf_plan *plan, bool *is_resident);
