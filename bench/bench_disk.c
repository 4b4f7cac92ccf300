/* bench_disk.c - how fast a file is read in sequence, by each method and depth.
 *
 * Plain reads of 1 MiB, one after the other in the file, nothing done with what they bring: the
 * denominator of every claim about streaming. All setups in turns, three rounds; each run reads
 * a part of its own, as far from the others as the file is long, and what the page cache holds
 * of that part is dropped before. Prints the median of each in GB/s (10^9), with the least and
 * the most; then one line for programs: `best direct x4 1.72 GB/s`.
 *
 * Usage: bench_disk FILE [--mb N] [--method NAME] [--depth N] [--rounds N] [--kib N] [--into-mb N]
 *                   [--cached]
 *   --mb N         so much is read by a run (default 256; no more than the file has)
 *   --method NAME  only buffered, direct, uring or mmap
 *   --depth N      only N reads at the same time (default 1, 2, 4 and 8)
 *   --rounds N     default 3, at most 99
 *   --kib N        bytes of a read, in KiB (default 1024)
 *   --into-mb N    reads go to N MiB of memory in turn, a place for each read under way or more;
 *                  default: those that are under way, again and again. A disk whose host copies
 *                  is slower into memory that was not used lately
 *   --cached       all runs read the beginning of the file, and nothing is dropped
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"
#include "base/status.h"
#include "platform/clock.h"
#include "io/io.h"
#include "platform/thread.h"

#define MAX_ROUNDS 99
#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define MAX_SETUPS 32
#define MAX_DEPTH 8 /* if none is asked for */
#define STACK_BYTES ((size_t)256 * 1024)

typedef struct options {
    const char *path;
    uint64_t run_bytes;
    size_t read_bytes;
    size_t into_bytes; /* 0: a place for each read under way */
    uint32_t method;   /* QSF_IO_AUTO: all */
    uint32_t depth;    /* 0: all */
    uint32_t n_rounds;
    bool is_cached;
} options;

typedef struct pass {
    qsf_io *io;
    unsigned char *buffer; /* places of read_bytes */
    uint32_t n_places;     /* the next read goes to; 0: where the one that ended went */
    size_t read_bytes;
    uint32_t queue_depth;
    uint64_t end_off;
    _Atomic uint64_t next_off;
    _Atomic uint32_t next_place;
} pass;

static void fail(void)
{
    fprintf(stderr, "bench_disk: %s\n", qsf_error_detail());
    exit(1);
}

static unsigned char *next_place(pass *p)
{
    const uint32_t i = atomic_fetch_add(&p->next_place, 1);
    return p->buffer + (p->n_places > 0 ? i % p->n_places : i) * p->read_bytes;
}

static bool start_next(pass *p, qsf_io_queue *queue, unsigned char *dst)
{
    const uint64_t off = atomic_fetch_add(&p->next_off, p->read_bytes);
    if (off >= p->end_off)
        return false;
    const qsf_io_read read = {
        .off = off, .dst = dst, .n_bytes = p->read_bytes, .need_bytes = p->read_bytes};
    if (qsf_io_start(queue, &read) != QSF_OK)
        fail();
    return true;
}

static void *read_queue(void *arg)
{
    pass *const p = arg;
    qsf_io_queue queue;
    if (qsf_io_queue_open(&queue, p->io, p->queue_depth) != QSF_OK)
        fail();
    for (uint32_t i = 0; i < p->queue_depth; i++)
        start_next(p, &queue, next_place(p));
    while (queue.n_started > 0) {
        qsf_io_read had;
        if (qsf_io_finish(&queue, &had) != QSF_OK)
            fail();
        start_next(p, &queue, p->n_places > 0 ? next_place(p) : had.dst);
    }
    qsf_io_queue_close(&queue);
    return NULL;
}

/* GB a second. */
static double run(const options *o, qsf_io *io, const qsf_io_setup *setup, unsigned char *buffer,
                  uint64_t begin_off)
{
    qsf_thread threads[QSF_IO_MAX_DEPTH];
    const uint32_t n_queues = qsf_io_queue_count(setup);
    pass p = {.io = io,
              .buffer = buffer,
              .n_places = (uint32_t)(o->into_bytes / o->read_bytes),
              .read_bytes = o->read_bytes,
              .queue_depth = qsf_io_queue_depth(setup),
              .end_off = begin_off + o->run_bytes,
              .next_off = begin_off};
#if defined(POSIX_FADV_DONTNEED)
    if (!o->is_cached)
        (void)posix_fadvise((int)io->file->handle, (off_t)begin_off, (off_t)o->run_bytes,
                            POSIX_FADV_DONTNEED);
#endif
    const uint64_t start_ns = qsf_clock_ns();
    for (uint32_t i = 0; i < n_queues; i++)
        if (qsf_thread_start(&threads[i], STACK_BYTES, read_queue, &p) != QSF_OK)
            fail();
    for (uint32_t i = 0; i < n_queues; i++)
        qsf_thread_join(&threads[i]);
    return (double)o->run_bytes / (double)(qsf_clock_ns() - start_ns);
}

static int by_value(const void *a, const void *b)
{
    const double *const x = a;
    const double *const y = b;
    return (*x > *y) - (*x < *y);
}

static uint64_t number(const char *text)
{
    char *end = NULL;
    const unsigned long long value = strtoull(text, &end, 10);
    if (value == 0 || *end != '\0') {
        fprintf(stderr, "bench_disk: %s is no number above 0\n", text);
        exit(2);
    }
    return value;
}

static uint32_t method_of(const char *name)
{
    for (uint32_t method = QSF_IO_BUFFERED; method <= QSF_IO_MMAP; method++)
        if (strcmp(name, qsf_io_method_name(method)) == 0)
            return method;
    fprintf(stderr, "bench_disk: %s is no method\n", name);
    exit(2);
}

static options parse(int argc, char **argv)
{
    options o = {.run_bytes = UINT64_C(256) << 20, .read_bytes = (size_t)1 << 20, .n_rounds = 3};
    for (int i = 1; i < argc; i++) {
        const char *const value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--cached") == 0) {
            o.is_cached = true;
            continue;
        }
        if (strncmp(argv[i], "--", 2) != 0) {
            o.path = argv[i];
            continue;
        }
        if (strcmp(argv[i], "--mb") == 0)
            o.run_bytes = number(value) << 20;
        else if (strcmp(argv[i], "--kib") == 0)
            o.read_bytes = (size_t)number(value) << 10;
        else if (strcmp(argv[i], "--into-mb") == 0)
            o.into_bytes = (size_t)number(value) << 20;
        else if (strcmp(argv[i], "--depth") == 0)
            o.depth = (uint32_t)number(value);
        else if (strcmp(argv[i], "--rounds") == 0)
            o.n_rounds = (uint32_t)number(value);
        else if (strcmp(argv[i], "--method") == 0)
            o.method = method_of(value);
        else
            o.n_rounds = 0; /* none that is known */
        i++;
    }
    if (o.path == NULL || o.n_rounds < 1 || o.n_rounds > MAX_ROUNDS || o.depth > QSF_IO_MAX_DEPTH ||
        o.read_bytes % QSF_IO_ALIGN != 0 ||
        (o.into_bytes > 0 && o.into_bytes / o.read_bytes < (o.depth > 0 ? o.depth : MAX_DEPTH))) {
        fprintf(stderr, "usage: bench_disk FILE [--mb N] [--method NAME] [--depth N] "
                        "[--rounds N] [--kib N] [--into-mb N] [--cached]\n");
        exit(2);
    }
    return o;
}

/* What is asked for and can be had. */
static size_t list_setups(const options *o, qsf_file *file, qsf_io *ios, qsf_io_setup *out)
{
    static const uint32_t depths[] = {1, 2, 4, MAX_DEPTH};
    size_t n = 0;
    for (uint32_t method = QSF_IO_BUFFERED; method <= QSF_IO_MMAP; method++) {
        if (o->method != QSF_IO_AUTO && o->method != method)
            continue;
        if (qsf_io_open(&ios[method], file, method) != QSF_OK) {
            printf("%-8s  %s\n", qsf_io_method_name(method), qsf_error_detail());
            continue;
        }
        if (o->depth != 0)
            out[n++] = (qsf_io_setup){method, o->depth};
        for (size_t i = 0; o->depth == 0 && i < sizeof depths / sizeof depths[0]; i++)
            out[n++] = (qsf_io_setup){method, depths[i]};
    }
    return n;
}

int main(int argc, char **argv)
{
    static double speeds[MAX_SETUPS][MAX_ROUNDS];
    options o = parse(argc, argv);
    qsf_file file;
    if (qsf_file_open(&file, o.path) != QSF_OK)
        fail();
    if (o.run_bytes > file.n_bytes)
        o.run_bytes = file.n_bytes;
    o.run_bytes -= o.run_bytes % o.read_bytes;
    const size_t buffer_bytes = qsf_round_up(
        o.into_bytes > 0 ? o.into_bytes : QSF_IO_MAX_DEPTH * o.read_bytes, HUGE_PAGE_BYTES);
    unsigned char *const buffer = aligned_alloc(HUGE_PAGE_BYTES, buffer_bytes);
#if defined(MADV_HUGEPAGE)
    if (buffer != NULL) /* as the engine's ring; small pages cost a third of the speed */
        (void)madvise(buffer, buffer_bytes, MADV_HUGEPAGE);
#endif
    if (o.run_bytes == 0 || buffer == NULL) {
        fprintf(stderr, "bench_disk: the file is smaller than a read, or no memory\n");
        return 1;
    }
    memset(buffer, 1, o.into_bytes); /* else the first reads would fault pages in */
    qsf_io ios[QSF_IO_MMAP + 1] = {0};
    qsf_io_setup setups[MAX_SETUPS];
    const size_t n_setups = list_setups(&o, &file, ios, setups);
    const uint64_t n_parts = file.n_bytes / o.run_bytes;
    uint64_t part_idx = 0;
    for (uint32_t round = 0; round < o.n_rounds; round++)
        for (size_t i = 0; i < n_setups; i++) {
            const uint64_t begin_off = o.is_cached ? 0 : part_idx++ % n_parts * o.run_bytes;
            speeds[i][round] = run(&o, &ios[setups[i].method], &setups[i], buffer, begin_off);
        }
    size_t best = 0;
    for (size_t i = 0; i < n_setups; i++) {
        qsort(speeds[i], o.n_rounds, sizeof speeds[i][0], by_value);
        printf("%-8s x%-2" PRIu32 "  %5.2f GB/s  (%.2f to %.2f)\n",
               qsf_io_method_name(setups[i].method), setups[i].depth, speeds[i][o.n_rounds / 2],
               speeds[i][0], speeds[i][o.n_rounds - 1]);
        if (speeds[i][o.n_rounds / 2] > speeds[best][o.n_rounds / 2])
            best = i;
    }
    if (n_setups > 0)
        printf("best %s x%" PRIu32 " %.2f GB/s\n", qsf_io_method_name(setups[best].method),
               setups[best].depth, speeds[best][o.n_rounds / 2]);
    for (uint32_t method = 0; method <= QSF_IO_MMAP; method++)
        qsf_io_close(&ios[method]);
    qsf_file_close(&file);
    free(buffer);
    return n_setups > 0 ? 0 : 1;
}
