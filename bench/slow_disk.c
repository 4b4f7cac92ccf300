/* slow_disk.c - preloaded, gives a process a disk of one known speed: large reads come from the page cache and end
 * when one queue of SLOW_READS_MB_S (read at each call) would have ended them.
 *
 *     cc -O2 -shared -fPIC -o slow_disk.so slow_disk.c -ldl
 *     SLOW_MAP=MODEL.qsf.map LD_PRELOAD=./slow_disk.so python disk_share.py MODEL.qsf 4096 90 8 1000,3000 3
 *
 * SLOW_MAP names what repeated_experts.py wrote beside the model: expert e of a layer is read where expert e % period
 * lies, so that 3 GB of page cache serve a file of 20 GB. SLOW_FIFO: reading threads get the real-time priority 2; with
 * `chrt -f 1` the others have 1, and no other work of the machine disturbs. */
/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SMALL_BYTES 65536 /* reads of the file's head and of single rows go to the file itself */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t free_ns; /* when the disk has done what was asked of it */
static struct { uint64_t first, stride, n, period; } layers[256];
static int n_layers = -1, cached_fd = -1;
static __thread int is_set_up;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static void load_map(void)
{
    const char *const name = getenv("SLOW_MAP");
    FILE *const in = name != NULL ? fopen(name, "r") : NULL;
    char path[512];
    n_layers = 0;
    if (in == NULL)
        return;
    while (n_layers < 256 &&
           fscanf(in, "%lu %lu %lu %lu", &layers[n_layers].first, &layers[n_layers].stride,
                  &layers[n_layers].n, &layers[n_layers].period) == 4)
        n_layers++;
    fclose(in);
    snprintf(path, sizeof path, "%.*s", (int)strlen(name) - 4, name);
    cached_fd = open(path, O_RDONLY);
}

static off_t place_of(off_t off)
{
    for (int i = 0; i < n_layers; i++) {
        const uint64_t from = (uint64_t)off - layers[i].first;
        const uint64_t expert = from / layers[i].stride;
        if ((uint64_t)off >= layers[i].first && expert < layers[i].n)
            return off - (off_t)((expert - expert % layers[i].period) * layers[i].stride);
    }
    return off;
}

ssize_t pread64(int fd, void *to, size_t n_bytes, off_t off)
{
    static ssize_t (*next)(int, void *, size_t, off_t);
    const char *const mb_s = getenv("SLOW_READS_MB_S");
    const double rate = mb_s != NULL ? strtod(mb_s, NULL) * 1e6 : 0.0;
    pthread_mutex_lock(&lock);
    if (next == NULL)
        next = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
    if (n_layers < 0)
        load_map();
    uint64_t end_ns = 0;
    if (rate > 0.0) {
        const uint64_t now = now_ns();
        end_ns = (free_ns > now ? free_ns : now) + (uint64_t)((double)n_bytes / rate * 1e9);
        free_ns = end_ns;
    }
    pthread_mutex_unlock(&lock);
    if (rate > 0.0 && !is_set_up) {
        const struct sched_param reader = {2};
        prctl(PR_SET_TIMERSLACK, 1000UL);
        if (getenv("SLOW_FIFO") != NULL)
            sched_setscheduler(0, SCHED_FIFO, &reader);
        is_set_up = 1;
    }
    const ssize_t got =
        next(n_layers > 0 && n_bytes > SMALL_BYTES ? cached_fd : fd, to, n_bytes, place_of(off));
    const struct timespec end = {(time_t)(end_ns / 1000000000U), (long)(end_ns % 1000000000U)};
    if (rate > 0.0)
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL);
    return got;
}

ssize_t pread(int fd, void *to, size_t n_bytes, off_t off)
{
    return pread64(fd, to, n_bytes, off);
}
