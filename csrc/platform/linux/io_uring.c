/* io_uring.c - direct reads through a ring of requests shared with the Linux kernel.
 *
 * Uses the system calls of linux/io_uring.h directly: a library is not worth it for reads alone. A
 * request is an entry of the submission queue. Its answer is an entry of the completion queue,
 * whose user_data is the request's slot in queue->started.
 *
 *     submission   we write the entry, then the tail (release); the kernel moves the head
 *     completion   the kernel writes the entry, then the tail; we read the tail (acquire), then
 *                  the entry, then move the head (release)
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "platform/file.h"

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif
#endif

#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_setup) && defined(__NR_io_uring_enter)

#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_READ_BYTES ((size_t)1 << 30) /* of a request: its result is an int32_t */
/* Retries, 10 s in all, while the kernel lacks memory for a request or a wait fails. */
#define MAX_PAUSES 10000
#define PAUSE_NS 1000000

#define AGAIN (-1) /* not an error of the system: the read must be submitted again */

typedef struct ring {
    uint32_t busy;                       /* bit i: slot i of queue->started has a read in flight */
    size_t done_bytes[QSF_IO_MAX_DEPTH]; /* of the read in the slot */
    int fd;
    void *queues; /* submission and completion queue, mapped */
    size_t queues_bytes;
    struct io_uring_sqe *requests; /* mapped */
    size_t requests_bytes;
    _Atomic uint32_t *request_head;
    _Atomic uint32_t *request_tail;
    uint32_t request_mask;
    uint32_t *request_order;
    _Atomic uint32_t *answer_head;
    _Atomic uint32_t *answer_tail;
    uint32_t answer_mask;
    const struct io_uring_cqe *answers;
} ring;

static void pause_shortly(void)
{
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    (void)nanosleep(&pause, NULL);
}

static int enter(const ring *r, uint32_t n_new, uint32_t n_wanted)
{
    const unsigned flags = n_wanted > 0 ? IORING_ENTER_GETEVENTS : 0U;
    return (int)syscall(__NR_io_uring_enter, r->fd, n_new, n_wanted, flags, NULL, 0);
}

static qsf_status fail_setup(const char *reason, int system_errno)
{
    return QSF_FAIL(UNSUPPORTED, "io_uring: %s: %s", reason, strerror(system_errno));
}

static void *map_shared(const ring *r, size_t n_bytes, uint64_t off)
{
    void *const at =
        mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, (off_t)off);
    return at != MAP_FAILED ? at : NULL;
}

static qsf_status map_queues(ring *r, const struct io_uring_params *p)
{
    const size_t order_end = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    const size_t answers_end = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    r->queues_bytes = order_end > answers_end ? order_end : answers_end;
    r->queues = map_shared(r, r->queues_bytes, IORING_OFF_SQ_RING);
    if (r->queues == NULL)
        return fail_setup("cannot map its queues", errno);
    r->requests_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    r->requests = map_shared(r, r->requests_bytes, IORING_OFF_SQES);
    if (r->requests == NULL)
        return fail_setup("cannot map its requests", errno);

    unsigned char *const base = r->queues;
    r->request_head = (_Atomic uint32_t *)(void *)(base + p->sq_off.head);
    r->request_tail = (_Atomic uint32_t *)(void *)(base + p->sq_off.tail);
    r->request_mask = *(const uint32_t *)(const void *)(base + p->sq_off.ring_mask);
    r->request_order = (uint32_t *)(void *)(base + p->sq_off.array);
    r->answer_head = (_Atomic uint32_t *)(void *)(base + p->cq_off.head);
    r->answer_tail = (_Atomic uint32_t *)(void *)(base + p->cq_off.tail);
    r->answer_mask = *(const uint32_t *)(const void *)(base + p->cq_off.ring_mask);
    r->answers = (const struct io_uring_cqe *)(const void *)(base + p->cq_off.cqes);
    return QSF_OK;
}

static qsf_status set_up(ring *r, uint32_t depth)
{
    struct io_uring_params p = {0};
    r->fd = (int)syscall(__NR_io_uring_setup, depth, &p);
    if (r->fd < 0) {
        const int why = errno;
        return fail_setup(why == ENOSYS  ? "this kernel lacks it, or a sandbox hides it"
                          : why == EPERM ? "a sandbox or kernel.io_uring_disabled forbids it"
                                         : "the kernel refuses a ring",
                          why);
    }
    QSF_FAIL_IF((p.features & IORING_FEAT_SINGLE_MMAP) == 0 ||
                    (p.features & IORING_FEAT_NODROP) == 0,
                UNSUPPORTED, "io_uring: this kernel's version of it is too old");
    return map_queues(r, &p);
}

static void tear_down(ring *r)
{
    if (r->requests != NULL)
        (void)munmap(r->requests, r->requests_bytes);
    if (r->queues != NULL)
        (void)munmap(r->queues, r->queues_bytes);
    if (r->fd >= 0)
        close(r->fd);
    (void)munmap(r, sizeof *r);
}

/* Submits the read in `slot`, or its rest. Returns 0 or an error of the system. */
static int submit(qsf_io_queue *queue, uint32_t slot)
{
    ring *const r = queue->ring;
    const qsf_io_read *const read = &queue->started[slot];
    /* A direct read must begin at a multiple of QSF_IO_ALIGN, so some bytes are read twice. */
    const size_t from = r->done_bytes[slot] / QSF_IO_ALIGN * QSF_IO_ALIGN;
    const size_t n_bytes = read->n_bytes - from;
    const uint32_t tail = atomic_load_explicit(r->request_tail, memory_order_relaxed);
    const uint32_t idx = tail & r->request_mask;
    r->requests[idx] = (struct io_uring_sqe){
        .opcode = IORING_OP_READ,
        .fd = (int)queue->io->direct,
        .off = read->off + from,
        .addr = (uintptr_t)(read->dst + from),
        .len = (uint32_t)(n_bytes < MAX_READ_BYTES ? n_bytes : MAX_READ_BYTES),
        .user_data = slot};
    r->request_order[idx] = idx;
    atomic_store_explicit(r->request_tail, tail + 1, memory_order_release);
    for (uint32_t n_pauses = 0;;) {
        const int n_taken = enter(r, 1, 0);
        const int why = n_taken < 0 ? errno : EAGAIN;
        if (atomic_load_explicit(r->request_head, memory_order_acquire) == tail + 1)
            return 0;
        if (why == EINTR)
            continue;
        if ((why != EAGAIN && why != EBUSY) || n_pauses++ == MAX_PAUSES) {
            atomic_store_explicit(r->request_tail, tail, memory_order_release); /* taken back */
            return why;
        }
        pause_shortly();
    }
}

/* Waits for the end of a read. *n_bytes: its bytes, 0 at the end of the file; *error: 0, its error
 * or AGAIN. Returns 0, or an error of the wait, which is retried first, because the kernel still
 * writes to the memory of the reads in flight. */
static int take(qsf_io_queue *queue, uint32_t *slot, size_t *n_bytes, int *error)
{
    ring *const r = queue->ring;
    const uint32_t head = atomic_load_explicit(r->answer_head, memory_order_relaxed);
    for (uint32_t n_pauses = 0;
         atomic_load_explicit(r->answer_tail, memory_order_acquire) == head;) {
        if (enter(r, 0, 1) >= 0 || errno == EINTR)
            continue;
        if (n_pauses++ == MAX_PAUSES)
            return errno;
        pause_shortly();
    }
    const struct io_uring_cqe answer = r->answers[head & r->answer_mask];
    atomic_store_explicit(r->answer_head, head + 1, memory_order_release);
    const bool is_again = answer.res == -EINTR || answer.res == -EAGAIN;
    *slot = (uint32_t)answer.user_data;
    *n_bytes = answer.res > 0 ? (size_t)answer.res : 0;
    *error = is_again ? AGAIN : answer.res < 0 ? -answer.res : 0;
    return 0;
}

static qsf_status open_queue(qsf_io_queue *queue)
{
    /* A ring takes about one page, the smallest unit of mmap. */
    ring *const r =
        mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    QSF_FAIL_IF(r == MAP_FAILED, NOMEM, "io_uring: the system has no memory left for a queue");
    r->fd = -1;
    const qsf_status status = set_up(r, queue->depth);
    if (status != QSF_OK) {
        tear_down(r);
        return status;
    }
    queue->ring = r;
    return QSF_OK;
}

_Static_assert(QSF_IO_MAX_DEPTH == 32, "`busy` has a bit for each slot");

static void release(qsf_io_queue *queue, uint32_t slot)
{
    ring *const r = queue->ring;
    r->busy &= ~(UINT32_C(1) << slot);
    queue->n_started--;
}

static bool is_busy(const ring *r, uint32_t slot)
{
    return (r->busy >> slot & 1) != 0;
}

static qsf_status start_read(qsf_io_queue *queue, const qsf_io_read *read)
{
    ring *const r = queue->ring;
    uint32_t slot = 0;
    while (is_busy(r, slot))
        slot++;
    queue->started[slot] = *read;
    r->done_bytes[slot] = 0;
    r->busy |= UINT32_C(1) << slot;
    queue->n_started++;
    const int error = submit(queue, slot);
    if (error == 0)
        return QSF_OK;
    release(queue, slot);
    return qsf_io_fail_system(queue->io, read, error);
}

/* Applies the end of a read in `slot`. *is_done is false if the rest was submitted again. */
static qsf_status judge(qsf_io_queue *queue, uint32_t slot, size_t n_bytes, int error,
                        bool *is_done)
{
    ring *const r = queue->ring;
    const qsf_io_read *const read = &queue->started[slot];
    *is_done = true;
    if (error != 0 && error != AGAIN)
        return qsf_io_fail_system(queue->io, read, error);
    if (error == 0) {
        const size_t done_bytes = r->done_bytes[slot] / QSF_IO_ALIGN * QSF_IO_ALIGN + n_bytes;
        if (done_bytes >= read->need_bytes)
            return QSF_OK;
        if (done_bytes <= r->done_bytes[slot])
            return qsf_io_fail_short(queue->io, read, r->done_bytes[slot]);
        r->done_bytes[slot] = done_bytes;
    }
    error = submit(queue, slot);
    if (error != 0)
        return qsf_io_fail_system(queue->io, read, error);
    *is_done = false;
    return QSF_OK;
}

static qsf_status finish_read(qsf_io_queue *queue, qsf_io_read *read)
{
    const ring *const r = queue->ring;
    for (;;) {
        uint32_t slot = 0;
        size_t n_bytes = 0;
        int error = 0;
        bool is_done = true;
        const int wait_error = take(queue, &slot, &n_bytes, &error);
        qsf_status status;
        if (wait_error == 0) {
            status = judge(queue, slot, n_bytes, error, &is_done);
        } else { /* the state of all reads is unknown; report any one */
            for (slot = 0; !is_busy(r, slot);)
                slot++;
            status = qsf_io_fail_system(queue->io, &queue->started[slot], wait_error);
        }
        if (!is_done)
            continue;
        *read = queue->started[slot];
        release(queue, slot);
        return status;
    }
}

static bool has_ended(const qsf_io_queue *queue)
{
    const ring *const r = queue->ring;
    return atomic_load_explicit(r->answer_tail, memory_order_acquire) !=
           atomic_load_explicit(r->answer_head, memory_order_relaxed);
}

static void close_queue(qsf_io_queue *queue)
{
    uint32_t slot;
    size_t n_bytes;
    int error;
    while (queue->n_started > 0 && take(queue, &slot, &n_bytes, &error) == 0)
        queue->n_started--;
    tear_down(queue->ring);
    queue->ring = NULL;
}

static const qsf_io_queue_fns queue_fns = {
    .open = open_queue,
    .close = close_queue,
    .start = start_read,
    .finish = finish_read,
    .has_ended = has_ended,
};

/* Only a read detects a kernel without IORING_OP_READ (before 5.6) or a sandbox that allows setup
 * but not use. */
static qsf_status open_uring(qsf_io *io)
{
    QSF_TRY(qsf_io_direct_open(io));
    _Alignas(QSF_IO_ALIGN) unsigned char block[QSF_IO_ALIGN];
    const qsf_io_read wanted = {.dst = block, .n_bytes = sizeof block};
    qsf_io_queue queue = {.io = io, .depth = 1};
    QSF_TRY(open_queue(&queue));
    qsf_io_read had;
    qsf_status status = start_read(&queue, &wanted);
    if (status == QSF_OK)
        status = finish_read(&queue, &had);
    close_queue(&queue);
    if (status != QSF_ERR_IO)
        return status;
    char why[160]; /* the file is readable by other methods */
    snprintf(why, sizeof why, "%s", qsf_error_detail());
    return QSF_FAIL(UNSUPPORTED, "I/O method uring: a trial read failed: %s", why);
}

#else

static qsf_status open_uring(qsf_io *io)
{
    (void)io;
    return QSF_FAIL(UNSUPPORTED, "io_uring: this build does not include it");
}

static const qsf_io_queue_fns queue_fns; /* unused: open_uring always fails */

#endif

const qsf_io_way qsf_io_uring_way = {
    .name = "uring",
    .open = open_uring,
    .close = qsf_io_direct_close,
    .queue_fns = &queue_fns,
};
