/* model_open.h - a model: its file, its plan, the memory it holds, its sessions.
 *
 * The one place where struct qsf_model is completed. Memory is decided by plan.c, taken
 * here at open and in session.c at session creation, and never afterwards.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_MODEL_OPEN_H
#define QSF_ENGINE_MODEL_OPEN_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/pressure.h"
#include "stream/stream.h"
#include "memory/ledger.h"
#include "model/forward.h"
#include "machine/sysmem.h"
#include "platform/thread.h"
#include "platform/trace.h"

/* For tests: makes the N-th request or read from open fail (negative: never), and says what
 * the process uses before the model instead of measuring it (0: measures). */
typedef struct qsf_faults {
    int64_t grants_until_fault;
    int64_t reads_until_fault;
    uint64_t process_bytes;
} qsf_faults;

struct qsf_model {
    /* written once before open returns */
    qsf_reader reader;
    qsf_config config;
    qsf_ends ends;
    qsf_kernels kernels;
    qsf_options options; /* resolved: nothing is 0 that means "choose" */
    qsf_plan plan;       /* what of it depends on resident units changes under lock */
    qsf_sysmem memory;   /* of the system and this process, before anything was taken */
    qsf_pool *pool;
    qsf_forward forward;
    qsf_io io;
    qsf_io_setup io_setup;
    bool io_is_probed;
    /* under lock */
    qsf_mutex lock;
    qsf_ledger ledger;
    qsf_stream stream;
    qsf_scratch scratch;
    qsf_pressure pressure;
    uint32_t n_sessions;
    bool is_closed;
    /* blocks of the ledger, with their sizes in the plan or beside them */
    void *tables_block;
    size_t tables_block_bytes;
    void *embedding_block;
    size_t embedding_block_bytes;
    void *scratch_block;
    size_t scratch_block_bytes;
    qsf_layer *layers; /* [n_layers] */
    size_t layers_bytes;
    bool *is_resident; /* [n_units] */
    size_t is_resident_bytes;
    bool has_lock;
    bool has_trace;
    qsf_trace trace; /* under its own lock */
};

/* faults may be NULL. */
qsf_status qsf_model_create(const char *path, const qsf_options *opt, const qsf_faults *faults,
                            qsf_model **out);

/* As qsf_model_plan of the public API. */
qsf_status qsf_model_measure(const char *path, const qsf_options *opt, qsf_plan *out);

/* The caller is done with the model; it lives on until its last session is gone. */
void qsf_model_destroy(qsf_model *m);

/* A session is gone; under no lock. Destroys a closed model with its last session. */
void qsf_model_forget_session(qsf_model *m);

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
