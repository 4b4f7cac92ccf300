/* model.h - a model: its file, its plan, its memory, the number of its sessions.
 *
 * plan.c plans the memory, model_open.c and session.c acquire it, and model.c releases it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "plan/pressure.h"
#include "engine/session_buffers.h"
#include "machine/sysmem.h"
#include "memory/ledger.h"
#include "model/forward.h"
#include "platform/thread.h"
#include "stream/stream.h"

struct qsf_model {
    /* written once before open returns */
    qsf_model *drafter;     /* draft model of this one, which owns it; NULL: none */
    bool is_drafter;        /* a draft model, which uses the thread pool of its target */
    bool has_table_on_disk; /* see qsf_plan_input */
    qsf_reader reader;
    qsf_config config;
    qsf_ends ends;
    qsf_kernels kernels;
    qsf_options options; /* values chosen for all fields that were 0 */
    qsf_plan plan;       /* fields that depend on resident units change under lock */
    qsf_sysmem memory;   /* of the system and this process, before open */
    qsf_pool *pool;
    qsf_forward forward;
    qsf_io io;
    qsf_io_setup io_setup;
    bool io_is_probed;
    /* under lock */
    qsf_mutex lock;
    qsf_ledger ledger;
    qsf_stream stream;
    qsf_experts experts;
    qsf_scratch scratch;
    qsf_shared_buffers shared; /* its sampler: under `choosing` */
    qsf_pressure pressure;
    qsf_sequence_pools
        pools; /* blocks in use: under kv_lock, the last lock in the order of locks */
    uint64_t full_ring_bytes; /* ring_bytes of the plan at open */
    uint32_t n_sessions;
    uint32_t n_created; /* sessions so far */
    bool is_closed;
    /* allocations from the ledger; the plan does not count all of them */
    void *tables_memory;
    size_t tables_memory_bytes;
    void *embedding_memory;
    size_t embedding_memory_bytes;
    void *scratch_memory;
    size_t scratch_memory_bytes;
    void *kv_memory;
    size_t kv_memory_bytes;
    qsf_layer *layers; /* [n_layers] */
    size_t layers_bytes;
    bool *is_resident; /* [n_stream_units] */
    size_t is_resident_bytes;
    bool has_lock;
    qsf_mutex choosing; /* taken for a choice; never waits for a pass */
    bool has_choosing;
    qsf_mutex kv_lock; /* protects the pools' blocks and slots, not their contents */
    bool has_kv_lock;
};

/* Releases all memory of a model, even if it is only partly open. qsf_model_close calls it once
 * no session is left. */
void qsf_model_release(qsf_model *m);

/* Removes one session from the count. Destroys a closed model with its last session. Call
 * without the lock. */
void qsf_model_forget_session(qsf_model *m);
