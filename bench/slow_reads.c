/* slow_reads.c - preloaded into a process, makes its reads at an offset as slow as a disk.
 *
 *     cc -O2 -shared -fPIC -o slow_reads.so slow_reads.c -ldl
 *     SLOW_READS_MB_S=100 LD_PRELOAD=./slow_reads.so qsf run MODEL --io buffered ...
 *
 * One queue for all threads: a read begins when the one before it has ended.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t free_ns; /* when the disk has done what was asked of it */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static void wait_for_disk(size_t n_bytes)
{
    const char *const mb_s = getenv("SLOW_READS_MB_S");
    const double rate = mb_s != NULL ? strtod(mb_s, NULL) * 1e6 : 0.0;
    if (rate <= 0.0)
        return;
    pthread_mutex_lock(&lock);
    const uint64_t now = now_ns();
    free_ns = (free_ns > now ? free_ns : now) + (uint64_t)((double)n_bytes / rate * 1e9);
    const uint64_t end_ns = free_ns;
    pthread_mutex_unlock(&lock);
    const struct timespec end = {(time_t)(end_ns / 1000000000U), (long)(end_ns % 1000000000U)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL);
}

ssize_t pread64(int fd, void *to, size_t n_bytes, off64_t off)
{
    static ssize_t (*next)(int, void *, size_t, off64_t);
    if (next == NULL)
        next = (ssize_t(*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
    wait_for_disk(n_bytes);
    return next(fd, to, n_bytes, off);
}

ssize_t pread(int fd, void *to, size_t n_bytes, off_t off)
{
    return pread64(fd, to, n_bytes, off);
}
