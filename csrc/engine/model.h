/* model.h - a model: its file, its plan, the memory it holds, the count of its sessions.
 *
 * The one place where struct qsf_model is completed. Memory is decided by plan.c, taken by
 * model_open.c and session.c, and released here.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_MODEL_H
#define QSF_ENGINE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/pressure.h"
#include "machine/sysmem.h"
#include "memory/ledger.h"
#include "model/forward.h"
#include "platform/thread.h"
#include "platform/trace.h"
#include "stream/stream.h"

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
    uint64_t full_ring_bytes; /* as the plan had it at open */
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

/* Gives everything back, also of a model that is half open. qsf_model_close only does so when no
 * session is left. */
void qsf_model_release(qsf_model *m);

/* A session is gone; under no lock. Destroys a closed model with its last session. */
void qsf_model_forget_session(qsf_model *m);

#endif
