/* model_open.h - opens a model: its file, its plan, its memory. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "include/qsf.h"

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
