/* thread_posix.c - threads, mutexes and conditions through POSIX threads; time and processors. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/thread.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include "base/status.h"
#include "platform/clock.h"
#include "platform/cpu.h"

_Static_assert(sizeof(pthread_mutex_t) <= QSF_LOCK_BYTES && _Alignof(pthread_mutex_t) <= 8, "");
_Static_assert(sizeof(pthread_cond_t) <= QSF_LOCK_BYTES && _Alignof(pthread_cond_t) <= 8, "");
_Static_assert(sizeof(pthread_t) == sizeof(uintptr_t), "");

static pthread_mutex_t *mutex_of(qsf_mutex *m)
{
    return (void *)m->system;
}

static pthread_cond_t *condition_of(qsf_condition *c)
{
    return (void *)c->system;
}

/* pthread_t is a number on some systems, a pointer on others. */
static pthread_t thread_of(const qsf_thread *t)
{
    return (pthread_t)t->system;
}

/* For calls that fail only if they are used wrongly. */
static void must_be_zero(int error)
{
    assert(error == 0);
    (void)error;
}

qsf_status qsf_mutex_init(qsf_mutex *m)
{
    const int error = pthread_mutex_init(mutex_of(m), NULL);
    m->is_made = error == 0;
    QSF_FAIL_IF(error != 0, NOMEM, "cannot create a mutex: %s", strerror(error));
    return QSF_OK;
}

void qsf_mutex_destroy(qsf_mutex *m)
{
    if (m->is_made)
        must_be_zero(pthread_mutex_destroy(mutex_of(m)));
    m->is_made = false;
}

void qsf_mutex_lock(qsf_mutex *m)
{
    must_be_zero(pthread_mutex_lock(mutex_of(m)));
}

void qsf_mutex_unlock(qsf_mutex *m)
{
    must_be_zero(pthread_mutex_unlock(mutex_of(m)));
}

qsf_status qsf_condition_init(qsf_condition *c)
{
#if defined(__APPLE__)
    const int error = pthread_cond_init(condition_of(c), NULL);
#else
    pthread_condattr_t attributes;
    must_be_zero(pthread_condattr_init(&attributes));
    must_be_zero(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)); /* for wait_for */
    const int error = pthread_cond_init(condition_of(c), &attributes);
    must_be_zero(pthread_condattr_destroy(&attributes));
#endif
    c->is_made = error == 0;
    QSF_FAIL_IF(error != 0, NOMEM, "cannot create a condition: %s", strerror(error));
    return QSF_OK;
}

void qsf_condition_destroy(qsf_condition *c)
{
    if (c->is_made)
        must_be_zero(pthread_cond_destroy(condition_of(c)));
    c->is_made = false;
}

void qsf_condition_wait(qsf_condition *c, qsf_mutex *m)
{
    must_be_zero(pthread_cond_wait(condition_of(c), mutex_of(m)));
}

void qsf_condition_wait_for(qsf_condition *c, qsf_mutex *m, uint64_t timeout_ns)
{
    const uint64_t second_ns = 1000000000;
    struct timespec until;
#if defined(__APPLE__)
    until.tv_sec = (time_t)(timeout_ns / second_ns);
    until.tv_nsec = (long)(timeout_ns % second_ns);
    const int error = pthread_cond_timedwait_relative_np(condition_of(c), mutex_of(m), &until);
#else
    clock_gettime(CLOCK_MONOTONIC, &until);
    const uint64_t total_ns = (uint64_t)until.tv_nsec + timeout_ns;
    until.tv_sec += (time_t)(total_ns / second_ns);
    until.tv_nsec = (long)(total_ns % second_ns);
    const int error = pthread_cond_timedwait(condition_of(c), mutex_of(m), &until);
#endif
    must_be_zero(error == ETIMEDOUT ? 0 : error);
}

void qsf_condition_wake_all(qsf_condition *c)
{
    must_be_zero(pthread_cond_broadcast(condition_of(c)));
}

void qsf_condition_wake_one(qsf_condition *c)
{
    must_be_zero(pthread_cond_signal(condition_of(c)));
}

/* Signals of faults stay open: a fault whose signal is blocked ends the process without calling the
 * application's handler, such as Python's faulthandler. */
static void fill_blocked(sigset_t *set)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigfillset(set);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        sigdelset(set, faults[i]);
}

static size_t least_stack_bytes(void)
{
    const long least = sysconf(_SC_THREAD_STACK_MIN);
    return least > 0 ? (size_t)least : (size_t)PTHREAD_STACK_MIN;
}

qsf_status qsf_thread_start(qsf_thread *t, size_t stack_bytes, void *(*run)(void *), void *arg)
{
    pthread_attr_t attributes;
    int error = pthread_attr_init(&attributes);
    QSF_FAIL_IF(error != 0, NOMEM, "cannot create thread attributes: %s", strerror(error));
    const size_t least_bytes = least_stack_bytes();
    error = pthread_attr_setstacksize(&attributes,
                                      stack_bytes > least_bytes ? stack_bytes : least_bytes);
    if (error == 0) {
        /* A thread inherits its creator's signal mask, so it is set before and restored after. */
        sigset_t blocked;
        sigset_t before;
        fill_blocked(&blocked);
        must_be_zero(pthread_sigmask(SIG_BLOCK, &blocked, &before));
        pthread_t started = (pthread_t)0;
        error = pthread_create(&started, &attributes, run, arg);
        t->system = (uintptr_t)started;
        must_be_zero(pthread_sigmask(SIG_SETMASK, &before, NULL));
    }
    pthread_attr_destroy(&attributes);
    QSF_FAIL_IF(error != 0, NOMEM, "cannot start a thread with a stack of %zu KB: %s",
                stack_bytes >> 10, strerror(error));
    return QSF_OK;
}

void qsf_thread_join(qsf_thread *t)
{
    must_be_zero(pthread_join(thread_of(t), NULL));
}

void qsf_thread_yield(void)
{
    (void)sched_yield();
}

void qsf_thread_hurry(void)
{
#if defined(__linux__)
    struct { /* sched_attr of its first version, which only glibc 2.41 and newer have */
        uint32_t n_bytes, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t slice_ns, deadline_ns, period_ns;
    } attributes;
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0)
        return;
    attributes.slice_ns = UINT64_C(100) * 1000; /* the least that Linux allows */
    if (attributes.policy == SCHED_OTHER)
        (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

qsf_status qsf_thread_pin(qsf_thread *t, uint32_t cpu)
{
#if defined(__linux__)
    cpu_set_t sets[8192 / CPU_SETSIZE]; /* most processors of a Linux kernel */
    CPU_ZERO_S(sizeof sets, sets);
    CPU_SET_S(cpu, sizeof sets, sets);
    const int error = pthread_setaffinity_np(thread_of(t), sizeof sets, sets);
    QSF_FAIL_IF(error != 0, ARG, "cannot pin a thread to processor %u: %s", cpu, strerror(error));
    return QSF_OK;
#else
    (void)t;
    return QSF_FAIL(UNSUPPORTED, "this system cannot pin threads (to processor %u)", cpu);
#endif
}

/* ---- time ---- */

uint64_t qsf_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail: the clock is mandatory */
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void qsf_sleep_ms(uint32_t n_ms)
{
    struct timespec left = {.tv_sec = n_ms / 1000, .tv_nsec = (long)(n_ms % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}

uint32_t qsf_cpu_count_online(void)
{
    const long n_online = sysconf(_SC_NPROCESSORS_ONLN);
    return n_online > 0 ? (uint32_t)n_online : 1;
}
