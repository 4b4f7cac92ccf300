/* least_budget.h - as little memory as will do for a model, so that its layers are streamed. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_LEAST_BUDGET_H
#define QSF_TESTS_LEAST_BUDGET_H

#include "check.h"
#include "engine/model_open.h"

/* Sets the budget of `opt` to the least for a file. Returns the memory that the process is taken to
 * have from then on, so that the budget stays the least. */
static inline qsf_faults least_budget(const char *path, qsf_options *opt)
{
    qsf_plan plan;
    opt->budget_bytes = 1;
    CHECK_STATUS(qsf_model_plan(path, opt, &plan), QSF_ERR_NOMEM);
    opt->budget_bytes = plan.min_budget_bytes;
    return (qsf_faults){-1, -1, plan.process_bytes};
}

#endif
