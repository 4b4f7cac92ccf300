/* check_io.c - each way of reading: the same bytes, the same failures, however many at a time.
 *
 * Ways that this machine does not have are named in a line of output. This program's own pread
 * stands in for the system's, so that interruptions and short reads come when asked for.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "count_open.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake_pread.h"
#include "platform/clock.h"
#include "io/io.h"

#define PIECE_BYTES ((size_t)64 * 1024)
#define FILE_BYTES ((uint64_t)23 * PIECE_BYTES + 5 * QSF_IO_ALIGN + 1234) /* an odd end */
#define N_PIECES 24
#define MAX_DEPTH 8

static const uint32_t methods[] = {QSF_IO_BUFFERED, QSF_IO_DIRECT, QSF_IO_URING, QSF_IO_MMAP};

static char folder[] = "check_io.XXXXXX";
static char path[64];
static size_t stride;
static unsigned char *contents; /* and room up to the end of the last piece */
static unsigned char *buffers;  /* MAX_DEPTH pieces */

static bool write_file(void)
{
    FILE *const file = fopen(path, "wb");
    if (file == NULL)
        return false;
    const bool ok = fwrite(contents, 1, FILE_BYTES, file) == FILE_BYTES;
    return fclose(file) == 0 && ok;
}

typedef struct opened {
    qsf_file f;
    qsf_io io;
    qsf_io_queue queue;
} opened;

/* Opens the file for a method, and a queue unless depth is 0. */
static bool start(opened *o, uint32_t method, uint32_t depth)
{
    *o = (opened){.f = {.handle = -1}};
    if (!CHECK_OK(qsf_file_open(&o->f, path)))
        return false;
    if (CHECK_OK(qsf_io_open(&o->io, &o->f, method)) &&
        (depth == 0 || CHECK_OK(qsf_io_queue_open(&o->queue, &o->io, depth))))
        return true;
    qsf_io_close(&o->io);
    qsf_file_close(&o->f);
    return false;
}

static void stop(opened *o, uint32_t depth)
{
    if (depth > 0)
        qsf_io_queue_close(&o->queue);
    qsf_io_close(&o->io);
    qsf_file_close(&o->f);
}

/* False, with a line of output, where the method cannot be had. */
static bool is_supported(uint32_t method)
{
    qsf_file f;
    qsf_io io;
    if (!CHECK_OK(qsf_file_open(&f, path)))
        return false;
    const qsf_status status = qsf_io_open(&io, &f, method);
    if (status != QSF_OK) {
        CHECK_STATUS(status, QSF_ERR_UNSUPPORTED);
        printf("skipped: %s: %s\n", qsf_io_method_name(method), qsf_error_detail());
    }
    qsf_io_close(&io);
    qsf_file_close(&f);
    return status == QSF_OK;
}

/* Piece `idx` of the file; tag and place are those of the buffer. */
static qsf_io_read piece(uint32_t idx, uint32_t buffer_idx)
{
    const uint64_t off = (uint64_t)idx * PIECE_BYTES;
    const uint64_t left_bytes = FILE_BYTES - off;
    return (qsf_io_read){.off = off,
                         .dst = buffers + buffer_idx * PIECE_BYTES,
                         .n_bytes = PIECE_BYTES,
                         .need_bytes = left_bytes < PIECE_BYTES ? (size_t)left_bytes : PIECE_BYTES,
                         .tag = buffer_idx};
}

static bool is_same(const qsf_io_read *read)
{
    return memcmp(read->dst, contents + read->off, read->need_bytes) == 0;
}

/* Piece n_begun, of which the last one, which is short, comes first. */
static void start_next(qsf_io_queue *queue, uint32_t n_begun, uint32_t buffer_idx)
{
    const qsf_io_read next = piece((n_begun + N_PIECES - 1) % N_PIECES, buffer_idx);
    memset(next.dst, 0xEE, PIECE_BYTES);
    CHECK_OK(qsf_io_start(queue, &next));
}

/* Reads the whole file with `depth` reads under way, of which number `faulty` goes wrong if there
 * is a kind of fault; each piece comes once, in any order. */
static void read_all(qsf_io *io, uint32_t depth, qsf_fault_kind kind, uint32_t faulty)
{
    qsf_io_queue queue;
    if (!CHECK_OK(qsf_io_queue_open(&queue, io, depth)))
        return;
    io->file->fault_kind = kind;
    io->file->reads_until_fault = kind == QSF_FAULT_NONE ? -1 : (int64_t)faulty;
    const uint64_t start_ns = qsf_clock_ns();
    bool is_read[N_PIECES] = {false};
    uint32_t n_begun = 0;
    for (; n_begun < depth; n_begun++)
        start_next(&queue, n_begun, n_begun);
    for (uint32_t n_done = 0; n_done < N_PIECES; n_done++) {
        qsf_io_read had;
        const qsf_status status = qsf_io_finish(&queue, &had);
        const uint64_t idx = had.off / PIECE_BYTES;
        const qsf_fault_kind here = n_done == faulty ? kind : QSF_FAULT_NONE;
        if (!CHECK(had.tag < depth && idx < N_PIECES && !is_read[idx]))
            break;
        is_read[idx] = true;
        const qsf_io_read same = piece((uint32_t)idx, (uint32_t)had.tag);
        CHECK(had.dst == same.dst && had.need_bytes == same.need_bytes);
        CHECK_STATUS(status, here == QSF_FAULT_FAIL    ? QSF_ERR_IO
                             : here == QSF_FAULT_SHORT ? QSF_ERR_FORMAT
                                                       : QSF_OK);
        if (status == QSF_OK)
            CHECK_EQ(is_same(&had), here != QSF_FAULT_CORRUPT);
        if (n_begun < N_PIECES)
            start_next(&queue, n_begun++, (uint32_t)had.tag);
    }
    CHECK_EQ(queue.n_started, 0);
    if (kind == QSF_FAULT_SLOW)
        CHECK(qsf_clock_ns() - start_ns >= (uint64_t)QSF_FAULT_SLOW_MS * 1000000);
    CHECK_EQ(io->file->reads_until_fault, -1);
    qsf_io_queue_close(&queue);
    qsf_io_queue_close(&queue); /* twice is fine */
}

static void check_reads(uint32_t method)
{
    static const qsf_fault_kind kinds[] = {QSF_FAULT_FAIL, QSF_FAULT_SHORT, QSF_FAULT_CORRUPT};
    opened o;
    if (!start(&o, method, 0))
        return;
    for (uint32_t depth = 1; depth <= MAX_DEPTH; depth++)
        read_all(&o.io, depth, QSF_FAULT_NONE, 0);
    for (size_t i = 0; i < COUNT_OF(kinds); i++)
        for (uint32_t n = 0; n < N_PIECES; n += (uint32_t)stride)
            read_all(&o.io, n % 2 == 0 ? 1 : 4, kinds[i], n);
    read_all(&o.io, 1, QSF_FAULT_SLOW, 0);
    read_all(&o.io, 4, QSF_FAULT_SLOW, 13);
    stop(&o, 0);
    qsf_io_close(&o.io); /* twice is fine */
}

static qsf_status read_one(qsf_io_queue *queue, uint64_t off, size_t n_bytes, size_t need_bytes)
{
    const qsf_io_read wanted = {
        .off = off, .dst = buffers, .n_bytes = n_bytes, .need_bytes = need_bytes, .tag = 42};
    qsf_io_read had = {0};
    memset(buffers, 0xEE, n_bytes);
    QSF_TRY(qsf_io_start(queue, &wanted));
    const qsf_status status = qsf_io_finish(queue, &had);
    CHECK_EQ_U64(had.tag, 42);
    CHECK_EQ_U64(had.off, off);
    if (status == QSF_OK)
        CHECK(is_same(&had));
    return status;
}

/* Sizes and places; what lies behind the end may be asked for, but not needed. */
static void check_sizes(uint32_t method)
{
    const uint64_t last_off = FILE_BYTES / QSF_IO_ALIGN * QSF_IO_ALIGN;
    const size_t last_bytes = (size_t)(FILE_BYTES - last_off);
    const struct {
        uint64_t off;
        size_t n_bytes;
        size_t need_bytes;
        qsf_status want;
    } cases[] = {
        {last_off, QSF_IO_ALIGN, last_bytes, QSF_OK},
        {last_off, QSF_IO_ALIGN, 1, QSF_OK},
        {last_off - QSF_IO_ALIGN, 8 * QSF_IO_ALIGN, QSF_IO_ALIGN + last_bytes, QSF_OK},
        {last_off, QSF_IO_ALIGN, last_bytes + 1, QSF_ERR_FORMAT},
        {last_off + QSF_IO_ALIGN, QSF_IO_ALIGN, 1, QSF_ERR_FORMAT},
        {UINT64_C(1) << 40, QSF_IO_ALIGN, 1, QSF_ERR_FORMAT},
        {UINT64_MAX - QSF_IO_ALIGN + 1, QSF_IO_ALIGN, 1, QSF_ERR_FORMAT},
        {0, PIECE_BYTES, PIECE_BYTES, QSF_OK}, /* none of it did harm */
    };
    opened o;
    if (!start(&o, method, 1))
        return;
    for (size_t n_blocks = 1; n_blocks <= 9; n_blocks += 4)
        for (uint64_t block = 0; block < 40; block += 13)
            CHECK_OK(read_one(&o.queue, block * QSF_IO_ALIGN, n_blocks * QSF_IO_ALIGN,
                              n_blocks * QSF_IO_ALIGN));
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        CHECK_STATUS(read_one(&o.queue, cases[i].off, cases[i].n_bytes, cases[i].need_bytes),
                     cases[i].want);
    stop(&o, 1);
}

/* A file that is cut while it is open is an error that says so; nothing is raised. */
static void check_truncated(uint32_t method)
{
    const uint64_t off = 2 * PIECE_BYTES;
    const size_t left = QSF_IO_ALIGN + 100;
    opened o;
    if (!start(&o, method, 2))
        return;
    CHECK_OK(read_one(&o.queue, off, PIECE_BYTES, PIECE_BYTES));
    CHECK_EQ(truncate(path, (off_t)(off + left)), 0);
    CHECK_OK(read_one(&o.queue, off, PIECE_BYTES, left));
    CHECK_STATUS(read_one(&o.queue, off, PIECE_BYTES, left + 1), QSF_ERR_FORMAT);
    CHECK_CONTAINS(qsf_error_detail(), "ends 1 bytes early");
    CHECK_EQ(truncate(path, 0), 0);
    CHECK_STATUS(read_one(&o.queue, 0, PIECE_BYTES, PIECE_BYTES), QSF_ERR_FORMAT);
    CHECK(write_file());
    CHECK_OK(read_one(&o.queue, 0, PIECE_BYTES, PIECE_BYTES));
    stop(&o, 2);
}

/* After a queue is closed nobody writes to its reads' memory: it can be unmapped and used anew. */
static void check_close_under_way(uint32_t method)
{
    for (uint32_t i = 0; i < 20; i++) {
        opened o;
        if (!start(&o, method, MAX_DEPTH))
            return;
        for (uint32_t n = 0; n < MAX_DEPTH; n++)
            start_next(&o.queue, n + i, n);
        if (i % 2 == 1) { /* and with one of them taken */
            qsf_io_read had;
            CHECK_OK(qsf_io_finish(&o.queue, &had));
            CHECK(is_same(&had));
        }
        qsf_io_queue_close(&o.queue);
        CHECK_EQ(o.queue.n_started, 0);
        memset(buffers, 0x55, MAX_DEPTH * PIECE_BYTES);
        const struct timespec pause = {.tv_nsec = 2000000};
        nanosleep(&pause, NULL);
        size_t n_same = 0;
        while (n_same < MAX_DEPTH * PIECE_BYTES && buffers[n_same] == 0x55)
            n_same++;
        CHECK_EQ_U64(n_same, MAX_DEPTH * PIECE_BYTES);
        stop(&o, 0);
    }
}

/* Calls that bring a part, or nothing yet, are gone on with; from where a block begins. */
static void check_short_calls(uint32_t method)
{
    static const size_t mosts[] = {QSF_IO_ALIGN, QSF_IO_ALIGN + 512, (size_t)9 * QSF_IO_ALIGN};
    opened o;
    if (!start(&o, method, 1))
        return;
    for (size_t i = 0; i < COUNT_OF(mosts); i++) {
        memset(&fake, 0, sizeof fake);
        fake.n_interrupts = 3;
        fake.most_bytes = mosts[i];
        CHECK_OK(read_one(&o.queue, PIECE_BYTES, PIECE_BYTES, PIECE_BYTES));
        CHECK(fake.n_calls > 3 && !fake.is_odd);
    }
    memset(&fake, 0, sizeof fake);
    fake.fail_errno = EIO;
    CHECK_STATUS(read_one(&o.queue, QSF_IO_ALIGN, PIECE_BYTES, PIECE_BYTES), QSF_ERR_IO);
    CHECK_CONTAINS(qsf_error_detail(), strerror(EIO));
    CHECK_CONTAINS(qsf_error_detail(), qsf_io_method_name(method));
    CHECK_CONTAINS(qsf_error_detail(), "65536 bytes at 4096");
    memset(&fake, 0, sizeof fake);
    stop(&o, 1);
}

/* File systems that let a file be opened for direct reads and then refuse them, as those with
 * larger blocks do, are found when it is opened. */
static void check_refused_blocks(uint32_t method)
{
    qsf_file f;
    qsf_io io;
    if (!CHECK_OK(qsf_file_open(&f, path)))
        return;
    const int n_open = count_open();
    fake.fail_errno = EINVAL;
    CHECK_STATUS(qsf_io_open(&io, &f, method), QSF_ERR_UNSUPPORTED);
    CHECK_CONTAINS(qsf_error_detail(), "4096");
    fake.fail_errno = EIO;
    CHECK_STATUS(qsf_io_open(&io, &f, method), QSF_ERR_IO);
    fake.fail_errno = 0;
    CHECK_EQ(io.direct, -1);
    CHECK_EQ(count_open(), n_open);
    qsf_file_close(&f);
}

/* Kilobytes of the mapping of the test's file that count as ours; -1: no mapping is found. */
static long mapped_kib(void)
{
    char line[512];
    long found = -1;
    bool is_file = false;
    FILE *const smaps = fopen("/proc/self/smaps", "r");
    while (smaps != NULL && found < 0 && fgets(line, sizeof line, smaps) != NULL) {
        is_file |= strstr(line, "model.qsf") != NULL;
        if (is_file && strncmp(line, "Rss:", 4) == 0)
            found = strtol(line + 4, NULL, 10);
    }
    if (smaps != NULL)
        fclose(smaps);
    return found;
}

/* What has been read from a mapping is not kept in it: it would count against the budget. */
static void check_mapping_is_empty(void)
{
    opened o;
    if (!start(&o, QSF_IO_MMAP, 0))
        return;
    CHECK_EQ(mapped_kib(), 0);
    for (uint32_t depth = 1; depth <= 4; depth += 3) {
        read_all(&o.io, depth, QSF_FAULT_NONE, 0);
        CHECK_EQ(mapped_kib(), 0);
    }
    stop(&o, 0);
}

/* Descriptors are given back by every way out. */
static void check_descriptors(uint32_t method)
{
    const int n_open = count_open();
    opened o;
    if (start(&o, method, 3)) {
        qsf_io_queue more;
        CHECK_OK(qsf_io_queue_open(&more, &o.io, 3));
        qsf_io_queue_close(&more);
        stop(&o, 3);
    }
    CHECK_EQ(count_open(), n_open);
    if (!start(&o, QSF_IO_BUFFERED, QSF_IO_MAX_DEPTH))
        return;
    qsf_io other;
    qsf_io_queue none;
    CHECK_STATUS(qsf_io_open(&other, &o.f, QSF_IO_AUTO), QSF_ERR_ARG);
    CHECK_STATUS(qsf_io_open(&other, &o.f, 99), QSF_ERR_ARG);
    qsf_io_close(&other);
    CHECK_STATUS(qsf_io_queue_open(&none, &o.io, 0), QSF_ERR_ARG);
    CHECK_STATUS(qsf_io_queue_open(&none, &o.io, QSF_IO_MAX_DEPTH + 1), QSF_ERR_ARG);
    stop(&o, QSF_IO_MAX_DEPTH);
    qsf_io zeroed = {0};
    qsf_io_close(&zeroed);
    CHECK_EQ(count_open(), n_open);
}

/* Bytes of the file that are in the page cache; SIZE_MAX where the system does not say. */
static size_t cached_bytes(int fd)
{
    unsigned char is_cached[FILE_BYTES / QSF_IO_ALIGN + 1];
    void *const map = mmap(NULL, FILE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED || sysconf(_SC_PAGESIZE) != QSF_IO_ALIGN)
        return SIZE_MAX;
    size_t n_bytes = 0;
    const bool is_told = mincore(map, FILE_BYTES, is_cached) == 0;
    for (size_t i = 0; is_told && i < sizeof is_cached; i++)
        n_bytes += (is_cached[i] & 1) != 0 ? QSF_IO_ALIGN : 0;
    munmap(map, FILE_BYTES);
    return is_told ? n_bytes : SIZE_MAX;
}

/* The kernel reads ahead no further than qsf_io_locked_bytes() says: pages on their way cannot be
 * reclaimed, and a control group that is full of them kills. */
static void check_no_readahead(uint32_t method)
{
    opened o;
    if (!start(&o, method, 1))
        return;
    const int fd = (int)o.f.handle;
    if (fsync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0 ||
        cached_bytes(fd) != 0) {
        printf("skipped: %s: pages of this file system stay in memory\n",
               qsf_io_method_name(method));
    } else {
        qsf_io_stop_readahead(&o.io);
        const size_t n_bytes = MAX_DEPTH * PIECE_BYTES;
        qsf_io_read read = {.dst = buffers, .n_bytes = n_bytes, .need_bytes = n_bytes};
        CHECK_OK(qsf_io_start(&o.queue, &read));
        CHECK_OK(qsf_io_finish(&o.queue, &read));
        CHECK(is_same(&read));
        CHECK(cached_bytes(fd) <=
              n_bytes + qsf_io_locked_bytes(method, 1) - QSF_IO_CACHED_STEP_BYTES);
    }
    stop(&o, 1);
}

int main(void)
{
    const size_t room_bytes = N_PIECES * PIECE_BYTES;
    stride = check_stride();
    contents = aligned_alloc(QSF_IO_ALIGN, room_bytes);
    buffers = aligned_alloc(QSF_IO_ALIGN, MAX_DEPTH * PIECE_BYTES);
    if (!CHECK(contents != NULL && buffers != NULL && mkdtemp(folder) != NULL))
        return check_report("check_io");
    for (size_t i = 0; i < room_bytes; i++)
        contents[i] = (unsigned char)(i * 7 + i / 251 + i / PIECE_BYTES);
    snprintf(path, sizeof path, "%s/model.qsf", folder);
    for (size_t i = 0; i < COUNT_OF(methods) && CHECK(write_file()); i++) {
        const uint32_t method = methods[i];
        if (!is_supported(method))
            continue;
        check_reads(method);
        check_sizes(method);
        check_truncated(method);
        check_close_under_way(method);
        check_descriptors(method);
        if (method == QSF_IO_BUFFERED || method == QSF_IO_DIRECT)
            check_short_calls(method);
        if (method == QSF_IO_BUFFERED || method == QSF_IO_MMAP)
            check_no_readahead(method);
        if (method == QSF_IO_DIRECT || method == QSF_IO_URING)
            check_refused_blocks(method);
        if (method == QSF_IO_MMAP)
            check_mapping_is_empty();
    }
    unlink(path);
    rmdir(folder);
    free(contents);
    free(buffers);
    return check_report("check_io");
}
