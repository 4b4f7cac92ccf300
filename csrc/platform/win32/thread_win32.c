/* thread_win32.c - threads, slim locks and condition variables of Windows, and its time. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/thread.h"

#include <process.h>
#include <stdlib.h>
#include <windows.h>

#include "base/status.h"
#include "platform/clock.h"
#include "platform/file.h"

_Static_assert(sizeof(SRWLOCK) <= QSF_LOCK_BYTES && sizeof(CONDITION_VARIABLE) <= QSF_LOCK_BYTES,
               "thread.h has room for them");

static SRWLOCK *lock_of(qsf_mutex *m)
{
    return (void *)m->system;
}

static CONDITION_VARIABLE *condition_of(qsf_condition *c)
{
    return (void *)c->system;
}

static HANDLE handle_of(const qsf_thread *t)
{
    return (HANDLE)t->system;
}

qsf_status qsf_mutex_init(qsf_mutex *m)
{
    InitializeSRWLock(lock_of(m));
    m->is_made = true;
    return QSF_OK;
}

void qsf_mutex_destroy(qsf_mutex *m)
{
    (void)m;
}

void qsf_mutex_lock(qsf_mutex *m)
{
    AcquireSRWLockExclusive(lock_of(m));
}

void qsf_mutex_unlock(qsf_mutex *m)
{
    ReleaseSRWLockExclusive(lock_of(m));
}

qsf_status qsf_condition_init(qsf_condition *c)
{
    InitializeConditionVariable(condition_of(c));
    c->is_made = true;
    return QSF_OK;
}

void qsf_condition_destroy(qsf_condition *c)
{
    (void)c;
}

void qsf_condition_wait(qsf_condition *c, qsf_mutex *m)
{
    (void)SleepConditionVariableSRW(condition_of(c), lock_of(m), INFINITE, 0);
}

void qsf_condition_wait_for(qsf_condition *c, qsf_mutex *m, uint64_t timeout_ns)
{
    const uint64_t timeout_ms = timeout_ns / 1000000 + (timeout_ns % 1000000 != 0);
    (void)SleepConditionVariableSRW(condition_of(c), lock_of(m),
                                    timeout_ms < INFINITE ? (DWORD)timeout_ms : INFINITE - 1, 0);
}

void qsf_condition_wake_all(qsf_condition *c)
{
    WakeAllConditionVariable(condition_of(c));
}

void qsf_condition_wake_one(qsf_condition *c)
{
    WakeConditionVariable(condition_of(c));
}

typedef struct start {
    void *(*run)(void *);
    void *arg;
} start;

static unsigned __stdcall run_thread(void *arg)
{
    const start s = *(const start *)arg;
    free(arg);
    (void)s.run(s.arg);
    return 0;
}

/* Without STACK_SIZE_PARAM_IS_A_RESERVATION the whole stack would be committed, which counts in
 * a job's limit although its pages are never touched. */
qsf_status qsf_thread_start(qsf_thread *t, size_t stack_bytes, void *(*run)(void *), void *arg)
{
    start *const s = malloc(sizeof *s);
    QSF_FAIL_IF(s == NULL, NOMEM, "cannot start a thread: no memory is left");
    *s = (start){.run = run, .arg = arg};
    t->system = (uintptr_t)_beginthreadex(NULL, (unsigned)stack_bytes, run_thread, s,
                                          STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    if (t->system != 0)
        return QSF_OK;
    char why[QSF_SYSTEM_ERROR_BYTES];
    qsf_system_error_text((int)GetLastError(), why);
    free(s);
    return QSF_FAIL(NOMEM, "cannot start a thread with a stack of %zu KB: %s", stack_bytes >> 10,
                    why);
}

void qsf_thread_join(qsf_thread *t)
{
    (void)WaitForSingleObject(handle_of(t), INFINITE);
    (void)CloseHandle(handle_of(t));
}

void qsf_thread_yield(void)
{
    (void)SwitchToThread();
}

void qsf_thread_hurry(void) /* Windows boosts threads whose reads end */
{
}

/* Windows numbers processors within groups of at most 64; `cpu` counts through all groups, each of
 * which takes 64 numbers, as system_win32.c lists them. */
qsf_status qsf_thread_pin(qsf_thread *t, uint32_t cpu)
{
    const GROUP_AFFINITY affinity = {.Mask = (KAFFINITY)1 << (cpu % 64), .Group = (WORD)(cpu / 64)};
    if (SetThreadGroupAffinity(handle_of(t), &affinity, NULL))
        return QSF_OK;
    char why[QSF_SYSTEM_ERROR_BYTES];
    qsf_system_error_text((int)GetLastError(), why);
    return QSF_FAIL(ARG, "cannot pin a thread to processor %u: %s", cpu, why);
}

/* ---- time ---- */

uint64_t qsf_clock_ns(void)
{
    const uint64_t second_ns = UINT64_C(1000000000);
    LARGE_INTEGER frequency; /* neither call can fail since Windows XP */
    LARGE_INTEGER count;
    QueryPerformanceFrequency(&frequency);
    QueryPerformanceCounter(&count);
    const uint64_t per_second = (uint64_t)frequency.QuadPart;
    const uint64_t ticks = (uint64_t)count.QuadPart;
    return ticks / per_second * second_ns + ticks % per_second * second_ns / per_second;
}

void qsf_sleep_ms(uint32_t n_ms)
{
    const uint64_t end_ns = qsf_clock_ns() + (uint64_t)n_ms * 1000000;
    for (uint64_t now_ns = qsf_clock_ns(); now_ns < end_ns; now_ns = qsf_clock_ns())
        Sleep((DWORD)((end_ns - now_ns + 999999) / 1000000));
}
