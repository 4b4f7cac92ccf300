/* thread.h - threads, mutexes and conditions of the system; nothing more.
 *
 * Opaque storage is completed in thread_posix.c; sizes are checked there.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_THREAD_H
#define QSF_PLATFORM_THREAD_H

#include <pthread.h>
#include <stddef.h>

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
void qsf_condition_wake_all(qsf_condition *c);

/* Starts `run(arg)` with a stack of stack_bytes and all signals blocked, so that
 * the application's handlers run on its own threads. */
qsf_status qsf_thread_start(qsf_thread *t, size_t stack_bytes, void *(*run)(void *), void *arg);
void qsf_thread_join(qsf_thread *t);

#endif
