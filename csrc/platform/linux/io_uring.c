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
#include <string.h>

#include "base/status.h"
#include "platform/io_slots.h"
#include "platform/posix/descriptor.h"

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

typedef struct ring {
    qsf_io_slots slots;
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
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "io_uring: %s: %s", reason, strerror(system_errno));
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
    if ((p.features & IORING_FEAT_SINGLE_MMAP) == 0 || (p.features & IORING_FEAT_NODROP) == 0)
        return QSF_FAIL(QSF_ERR_UNSUPPORTED, "io_uring: this kernel's version of it is too old");
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

static int submit(qsf_io_queue *queue, uint32_t slot, size_t from)
{
    ring *const r = queue->ring;
    const qsf_io_read *const read = &queue->started[slot];
    const size_t n_bytes = read->n_bytes - from;
    const uint32_t tail = atomic_load_explicit(r->request_tail, memory_order_relaxed);
    const uint32_t idx = tail & r->request_mask;
    r->requests[idx] = (struct io_uring_sqe){
        .opcode = IORING_OP_READ,
        .fd = qsf_io_direct_fd(queue->io),
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

/* Retries after errors, because the kernel still writes to the memory of the reads in flight. */
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
    *error = is_again ? QSF_IO_AGAIN : answer.res < 0 ? -answer.res : 0;
    return 0;
}

static const qsf_io_slot_fns slot_fns = {.submit = submit, .take = take};

static qsf_status open_queue(qsf_io_queue *queue)
{
    /* A ring takes about one page, the smallest unit of mmap. */
    ring *const r =
        mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (r == MAP_FAILED)
        return QSF_FAIL(QSF_ERR_NOMEM, "io_uring: the system has no memory left for a queue");
    r->fd = -1;
    const qsf_status status = set_up(r, queue->depth);
    if (status != QSF_OK) {
        tear_down(r);
        return status;
    }
    r->slots.fns = &slot_fns;
    queue->ring = r;
    return QSF_OK;
}

static bool has_ended(const qsf_io_queue *queue)
{
    const ring *const r = queue->ring;
    return atomic_load_explicit(r->answer_tail, memory_order_acquire) !=
           atomic_load_explicit(r->answer_head, memory_order_relaxed);
}

static void close_queue(qsf_io_queue *queue)
{
    qsf_io_slots_drain(queue);
    tear_down(queue->ring);
    queue->ring = NULL;
}

static const qsf_io_queue_fns queue_fns = {
    .open = open_queue,
    .close = close_queue,
    .start = qsf_io_slots_start,
    .finish = qsf_io_slots_finish,
    .has_ended = has_ended,
};

/* Only a read detects a kernel without IORING_OP_READ (before 5.6) or a sandbox that allows setup
 * but not use. */
static qsf_status open_uring(qsf_io *io)
{
    QSF_TRY(qsf_io_direct_open(io));
    return qsf_io_try_queue(io, &queue_fns);
}

#else

static qsf_status open_uring(qsf_io *io)
{
    (void)io;
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "io_uring: this build does not include it");
}

static const qsf_io_queue_fns queue_fns; /* unused: open_uring always fails */

#endif

const qsf_io_way qsf_io_uring_way = {
    .name = "uring",
    .open = open_uring,
    .close = qsf_io_direct_close,
    .queue_fns = &queue_fns,
};
