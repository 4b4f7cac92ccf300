/* thread.h - threads, mutexes and conditions of the system; nothing more. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_THREAD_H
#define QSF_PLATFORM_THREAD_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "include/qsf.h"

typedef struct qsf_mutex {
    pthread_mutex_t system;
} qsf_mutex;

typedef struct qsf_condition {
    pthread_cond_t system;
} qsf_condition;

typedef struct qsf_thread {
    pthread_t system;
} qsf_thread;

qsf_status qsf_mutex_init(qsf_mutex *m);
void qsf_mutex_destroy(qsf_mutex *m);
void qsf_mutex_lock(qsf_mutex *m);
void qsf_mutex_unlock(qsf_mutex *m);

qsf_status qsf_condition_init(qsf_condition *c);
void qsf_condition_destroy(qsf_condition *c);
void qsf_condition_wait(qsf_condition *c, qsf_mutex *m);
/* Returns after timeout_ns at the latest; as after any wait, look at what was waited for. */
void qsf_condition_wait_for(qsf_condition *c, qsf_mutex *m, uint64_t timeout_ns);
void qsf_condition_wake_all(qsf_condition *c);

/* Starts `run(arg)` with a stack of stack_bytes (more where the system's least is
 * more). Signals are blocked in it, so that the application's handlers run on its own
 * threads; not those that a fault of the thread itself raises, such as SIGSEGV.
 * QSF_ERR_NOMEM when the system has no room for a thread. */
qsf_status qsf_thread_start(qsf_thread *t, size_t stack_bytes, void *(*run)(void *), void *arg);
void qsf_thread_join(qsf_thread *t);

/* Lets another thread have this processor, if one wants it. */
void qsf_thread_yield(void);

/* Lets a started thread run on processor `cpu` alone. QSF_ERR_ARG: the system refuses;
 * QSF_ERR_UNSUPPORTED: it cannot be asked. */
qsf_status qsf_thread_pin(qsf_thread *t, uint32_t cpu);

#endif
