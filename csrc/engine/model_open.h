/* model_open.h - opens a model: its file, its plan, its memory. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_MODEL_OPEN_H
#define QSF_ENGINE_MODEL_OPEN_H

#include <stdint.h>

#include "include/qsf.h"

/* For tests: makes the N-th request or read from open fail (negative: never), and says what
 * the process uses before the model instead of measuring it (0: measures). */
typedef struct qsf_faults {
    int64_t grants_until_fault;
    int64_t reads_until_fault;
    uint64_t process_bytes;
} qsf_faults;

/* faults may be NULL. */
qsf_status qsf_model_create(const char *path, const qsf_options *opt, const qsf_faults *faults,
                            qsf_model **out);

/* As qsf_model_plan of the public API. */
qsf_status qsf_model_measure(const char *path, const qsf_options *opt, qsf_plan *out);

void qsf_model_describe(const qsf_model *m, qsf_model_facts *out);
/* As qsf_model_timeline and qsf_model_memory_events of the public API. */
size_t qsf_model_list_times(qsf_model *m, qsf_unit_time *out, size_t cap_units);
size_t qsf_model_list_events(qsf_model *m, qsf_memory_event *out, size_t cap_events);
/* As qsf_model_trace and qsf_model_trace_count of the public API. */
void qsf_model_set_trace(qsf_model *m, qsf_trace_event *events, size_t cap_events);
size_t qsf_model_count_trace(qsf_model *m, uint64_t *n_dropped);
uint64_t qsf_model_find_section(const qsf_model *m, const char *tag);
qsf_status qsf_model_read_section(qsf_model *m, const char *tag, void *dst, uint64_t cap_bytes);
qsf_status qsf_model_verify_file(const char *path);

#endif
