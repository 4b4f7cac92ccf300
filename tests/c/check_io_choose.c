/* check_io_choose.c - which way of reading is taken, and what is said where one is forbidden.
 *
 * The forbidding is done by system call filters, as sandboxes do; it comes last, since a filter
 * stays. What this machine cannot do is named in a line of output.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "count_open.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "platform/file.h"
#include "base/checked.h"
#include "io/io.h"
#include "io/pace.h"

#if defined(__linux__)
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#define SMALL_BYTES ((size_t)3 << 20)
/* A hole, but for its beginning */
#define LARGE_BYTES ((off_t)80 << 20)

static char folder[] = "check_io_choose.XXXXXX";
static char small_path[64];
static char large_path[64];
static unsigned char *buffer; /* QSF_IO_ALIGN */
static bool has_direct;
static bool has_uring;

static bool write_files(void)
{
    FILE *const small = fopen(small_path, "wb");
    FILE *const large = fopen(large_path, "wb");
    if (small == NULL || large == NULL)
        return false;
    for (size_t i = 0; i < SMALL_BYTES; i++)
        fputc((int)(i * 7 + i / 251) & 0xFF, small);
    fputs("the beginning", large);
    const bool ok = fflush(small) == 0 && fsync(fileno(small)) == 0 && fflush(large) == 0 &&
                    ftruncate(fileno(large), LARGE_BYTES) == 0 && fsync(fileno(large)) == 0;
    return fclose(small) == 0 && fclose(large) == 0 && ok;
}

/* Takes the file out of the page cache; false where that cannot be done. */
static bool drop(const qsf_file *f)
{
#if defined(POSIX_FADV_DONTNEED)
    if (posix_fadvise((int)f->handle, 0, 0, POSIX_FADV_DONTNEED) != 0)
        return false;
#endif
    return !qsf_io_is_cached(f);
}

/* What nothing is known of, and what no cache can hold. */
static qsf_io_wish wish_auto(void)
{
    return (qsf_io_wish){.max_threads = QSF_IO_MAX_DEPTH, .cache_bytes = 1000, .read_bytes = 1001};
}

typedef struct choice {
    qsf_status status;
    qsf_io_setup setup;
} choice;

/* Chooses for a file, reads a block that way, and closes. */
static choice choose(qsf_file *f, const qsf_io_wish *wish)
{
    qsf_io io;
    choice c = {0};
    c.status = qsf_io_choose(&io, f, wish, &c.setup);
    if (c.status != QSF_OK) {
        CHECK_EQ(io.direct, -1);
        return c;
    }
    CHECK_EQ(io.method, c.setup.method);
    CHECK(c.setup.depth >= 1 && qsf_io_queue_count(&c.setup) <= wish->max_threads);
    qsf_io_queue queue;
    if (CHECK_OK(qsf_io_queue_open(&queue, &io, qsf_io_queue_depth(&c.setup)))) {
        const qsf_io_read wanted = {
            .dst = buffer, .n_bytes = QSF_IO_ALIGN, .need_bytes = QSF_IO_ALIGN};
        qsf_io_read had;
        memset(buffer, 0xEE, QSF_IO_ALIGN);
        CHECK_OK(qsf_io_start(&queue, &wanted));
        CHECK_OK(qsf_io_finish(&queue, &had));
        unsigned char want[16];
        CHECK_OK(qsf_file_read_at(f, 0, want, sizeof want));
        CHECK_BYTES(buffer, want, sizeof want);
    }
    qsf_io_queue_close(&queue);
    qsf_io_close(&io);
    return c;
}

static void check_named(qsf_file *f)
{
    for (uint32_t method = QSF_IO_BUFFERED; method <= QSF_IO_MMAP; method++) {
        qsf_io_wish wish = {.method = method, .max_threads = 16, .cache_bytes = UINT64_MAX};
        const choice c = choose(f, &wish);
        if (c.status == QSF_ERR_UNSUPPORTED) {
            printf("skipped: %s: %s\n", qsf_io_method_name(method), qsf_error_detail());
            continue;
        }
        has_direct |= method == QSF_IO_DIRECT;
        has_uring |= method == QSF_IO_URING;
        CHECK_STATUS(c.status, QSF_OK);
        CHECK_EQ(c.setup.method, method);
        for (wish.depth = 1; wish.depth <= 16; wish.depth++)
            CHECK_EQ(choose(f, &wish).setup.depth, wish.depth);
        wish.max_threads = 3; /* there is memory for no more */
        wish.depth = 5;
        CHECK_EQ(choose(f, &wish).setup.depth, method == QSF_IO_URING ? 5 : 3);
    }
    qsf_io_wish wish = {.method = QSF_IO_MMAP + 1, .max_threads = 1};
    CHECK_STATUS(choose(f, &wish).status, QSF_ERR_ARG);
    wish = (qsf_io_wish){.depth = QSF_IO_MAX_DEPTH + 1, .max_threads = QSF_IO_MAX_DEPTH + 1};
    CHECK_STATUS(choose(f, &wish).status, QSF_ERR_ARG);
    wish = (qsf_io_wish){.depth = 1};
    CHECK_STATUS(choose(f, &wish).status, QSF_ERR_ARG);
}

/* What fits the cache, or is there already, is read through it. */
static void check_cached(qsf_file *f)
{
    qsf_io_wish wish = wish_auto();
    const size_t n_bytes = (size_t)f->n_bytes;
    unsigned char *const all = malloc(n_bytes);
    if (!CHECK(all != NULL) || !CHECK_OK(qsf_file_read_at(f, 0, all, n_bytes)))
        return;
#if defined(__linux__)
    CHECK(qsf_io_is_cached(f));
    CHECK_EQ(choose(f, &wish).setup.method, QSF_IO_BUFFERED);
#else
    printf("skipped: this system does not say what it has cached\n");
    free(all);
    return;
#endif
    if (!drop(f)) {
        printf("skipped: this file system keeps what it is asked to drop\n");
    } else {
        const uint32_t want = has_direct ? QSF_IO_DIRECT : QSF_IO_BUFFERED;
        CHECK_EQ(choose(f, &wish).setup.method, want);
        CHECK(!qsf_io_is_cached(f)); /* asking brought nothing in */
        /* A tenth of it is not most of it, three quarters are; however far the system reads on
         * behind what it is asked for. */
        CHECK_OK(qsf_file_read_at(f, 0, all, n_bytes / 10));
        CHECK(!qsf_io_is_cached(f));
        CHECK_OK(qsf_file_read_at(f, 0, all, n_bytes / 4 * 3));
        CHECK(qsf_io_is_cached(f));
    }
    free(all);
}

static void check_depths(qsf_file *small)
{
    if (!has_direct || !drop(small))
        return;
    qsf_io_wish wish = wish_auto();
    qsf_io_setup setup = choose(small, &wish).setup;
    CHECK(setup.method == QSF_IO_DIRECT && setup.depth == QSF_IO_USUAL_DEPTH && !setup.is_fixed);
    wish.max_threads = 2;
    CHECK_EQ(choose(small, &wish).setup.depth, 2);
    wish.cache_bytes = wish.read_bytes;
    CHECK_EQ(choose(small, &wish).setup.method, QSF_IO_BUFFERED);
    wish = wish_auto();
    wish.depth = 3;
    setup = choose(small, &wish).setup;
    CHECK(setup.method == QSF_IO_DIRECT && setup.depth == 3 && setup.is_fixed);
}

/* Bytes a nanosecond of a disk that is fastest with best_depth reads in flight. */
static double speed_of(uint32_t depth, uint32_t best_depth)
{
    const double share = (double)QSF_MIN(depth, best_depth) / (double)QSF_MAX(depth, best_depth);
    return 1.0 + share;
}

/* Reads n pieces of 1 MiB in simulated time. */
static void pass(qsf_pace *p, uint64_t *now_ns, uint32_t n, uint32_t best_depth)
{
    for (uint32_t i = 0; i < n; i++) {
        *now_ns += (uint64_t)((1 << 20) / speed_of(p->limit, best_depth));
        (void)qsf_pace_count(p, 1 << 20, *now_ns);
        CHECK(p->limit >= 1 && p->limit <= p->most);
    }
}

/* The number of reads in flight climbs to the fastest, and follows a disk that changes. */
static void check_pace(void)
{
    static const uint32_t bests[] = {1, 8, 2, 4, 8, 1};
    uint64_t now_ns = 1;
    qsf_pace p;
    qsf_pace_init(&p, 8, false);
    for (size_t i = 0; i < COUNT_OF(bests); i++) {
        pass(&p, &now_ns, 50000, bests[i]);
        CHECK_EQ(p.best, bests[i]);
        const uint64_t begin_ns = now_ns;
        pass(&p, &now_ns, 50000, bests[i]); /* what comparing costs */
        CHECK((double)(now_ns - begin_ns) * speed_of(1, 1) < 1.02 * 50000 * (1 << 20));
    }
    qsf_pace_init(&p, 6, true);
    pass(&p, &now_ns, 1000, 1);
    CHECK_EQ(p.limit, 6);
    qsf_pace_init(&p, 2, false);
    for (uint32_t i = 0; i < 1000; i++) { /* never long enough undisturbed */
        pass(&p, &now_ns, 5, 1);
        qsf_pace_disturb(&p);
    }
    CHECK_EQ(p.limit, 2);
    qsf_pace_init(&p, 8, false);
    for (uint32_t i = 0; i < 100000 && p.limit == p.best; i++)
        pass(&p, &now_ns, 1, 4);
    CHECK(p.limit != p.best); /* a trial, and from now on no measurement ends */
    for (uint32_t i = 0; i < 100; i++) {
        pass(&p, &now_ns, 30, 4);
        qsf_pace_disturb(&p);
    }
    CHECK_EQ(p.limit, p.best);
}

#if defined(__linux__) && defined(SECCOMP_RET_ERRNO)

/* From now on system call `number` fails with `error`; if bits != 0, only where its argument
 * `arg_idx` has one of them. False where filters cannot be had. */
static bool forbid(long number, size_t arg_idx, uint32_t bits, int error)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                 (uint32_t)(offsetof(struct seccomp_data, args) + 8 * arg_idx)),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    if (bits == 0) /* whatever the argument is */
        code[3] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JA, 0, 0, 0);
    const struct sock_fprog filter = {.len = COUNT_OF(code), .filter = code};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

static void refuse(qsf_file *f, uint32_t method, int error)
{
    const int n_open = count_open();
    const qsf_io_wish wish = {.method = method, .max_threads = 1};
    CHECK_STATUS(choose(f, &wish).status, QSF_ERR_UNSUPPORTED);
    CHECK_CONTAINS(qsf_error_detail(), strerror(error));
    CHECK_EQ(count_open(), n_open);
}

static void check_forbidden(qsf_file *f, qsf_file *large)
{
    qsf_io_wish wish = wish_auto();
    static const int errors[] = {EPERM, ENOSYS};
    for (size_t i = 0; has_uring && i < 2; i++) {
        /* A ring that can be made, but not used; then one that cannot be made. */
        const long number = i == 0 ? __NR_io_uring_enter : __NR_io_uring_setup;
        if (!forbid(number, 0, 0, errors[i])) {
            printf("skipped: what is forbidden: no filters for system calls here\n");
            return;
        }
        refuse(f, QSF_IO_URING, errors[i]);
    }
    if (has_direct && drop(large)) { /* without io_uring */
        const choice c = choose(large, &wish);
        CHECK(c.setup.method == QSF_IO_DIRECT);
    }
    if (!forbid(__NR_process_vm_readv, 0, 0, EPERM)) {
        printf("skipped: what is forbidden: no filters for system calls here\n");
        return;
    }
    refuse(f, QSF_IO_MMAP, EPERM);
    CHECK(forbid(__NR_openat, 2, O_DIRECT, EINVAL));
#if defined(__NR_open) /* musl's open() still calls it */
    CHECK(forbid(__NR_open, 1, O_DIRECT, EINVAL));
#endif
    refuse(f, QSF_IO_DIRECT, EINVAL);
    CHECK_CONTAINS(qsf_error_detail(), "file system");
    const choice c = choose(large, &wish);
    CHECK_STATUS(c.status, QSF_OK);
    CHECK(c.setup.method == QSF_IO_BUFFERED);
}

#else

static void check_forbidden(qsf_file *f, qsf_file *large)
{
    (void)f;
    (void)large;
    printf("skipped: what is forbidden: no filters for system calls here\n");
}

#endif

int main(void)
{
    buffer = aligned_alloc(QSF_IO_ALIGN, QSF_IO_ALIGN);
    if (!CHECK(buffer != NULL && mkdtemp(folder) != NULL))
        return check_report("check_io_choose");
    snprintf(small_path, sizeof small_path, "%s/small.qsf", folder);
    snprintf(large_path, sizeof large_path, "%s/large.qsf", folder);
    qsf_file small = {.handle = -1};
    qsf_file large = {.handle = -1};
    if (CHECK(write_files()) && CHECK_OK(qsf_file_open(&small, small_path)) &&
        CHECK_OK(qsf_file_open(&large, large_path))) {
        const int n_open = count_open();
        check_named(&small);
        check_cached(&small);
        check_depths(&small);
        check_pace();
        check_forbidden(&small, &large);
        CHECK_EQ(count_open(), n_open);
    }
    qsf_file_close(&small);
    qsf_file_close(&large);
    unlink(small_path);
    unlink(large_path);
    rmdir(folder);
    free(buffer);
    return check_report("check_io_choose");
}
