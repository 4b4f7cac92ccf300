/* thread.h - threads, mutexes and condition variables of the system. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "include/qsf.h"

#define QSF_LOCK_BYTES 64 /* room for a mutex or a condition variable of any system */

typedef struct qsf_mutex {
    _Alignas(8) unsigned char system[QSF_LOCK_BYTES];
    bool is_made;
} qsf_mutex;

typedef struct qsf_condition {
    _Alignas(8) unsigned char system[QSF_LOCK_BYTES];
    bool is_made;
} qsf_condition;

typedef struct qsf_thread {
    uintptr_t system;
} qsf_thread;

/* Both `destroy` accept a zeroed one, and one whose `init` failed. */
qsf_status qsf_mutex_init(qsf_mutex *m);
void qsf_mutex_destroy(qsf_mutex *m);
void qsf_mutex_lock(qsf_mutex *m);
void qsf_mutex_unlock(qsf_mutex *m);

qsf_status qsf_condition_init(qsf_condition *c);
void qsf_condition_destroy(qsf_condition *c);
void qsf_condition_wait(qsf_condition *c, qsf_mutex *m);
/* Returns after timeout_ns at the latest. Check the condition after every wait. */
void qsf_condition_wait_for(qsf_condition *c, qsf_mutex *m, uint64_t timeout_ns);
void qsf_condition_wake_all(qsf_condition *c);
void qsf_condition_wake_one(qsf_condition *c);

/* Starts `run(arg)` with a stack of stack_bytes, or the system's minimum if that is more. The
 * thread blocks signals, so that the application's handlers run on its own threads; signals of a
 * fault in the thread, such as SIGSEGV, are not blocked. QSF_ERR_NOMEM: the system cannot create a
 * thread. */
qsf_status qsf_thread_start(qsf_thread *t, size_t stack_bytes, void *(*run)(void *), void *arg);
void qsf_thread_join(qsf_thread *t);

/* Offers this processor to another thread. */
void qsf_thread_yield(void);

/* Asks that this thread, which works briefly and then waits, interrupts longer work when it wakes:
 * Linux 6.12 and newer lets threads of short slices do that, unless the application chose a policy.
 * Elsewhere without effect. */
void qsf_thread_hurry(void);

/* Pins a started thread to processor `cpu`. QSF_ERR_ARG: the system refuses; QSF_ERR_UNSUPPORTED:
 * the system cannot pin threads. */
qsf_status qsf_thread_pin(qsf_thread *t, uint32_t cpu);
