/* io_iocp.c - direct reads that Windows performs while the thread continues: what io_uring is on
 * Linux, and the method of the same name.
 *
 * A queue has a handle of its own and a completion port, which receives a packet for each read that
 * was started, also for one that failed.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"
#include "platform/io_way.h"
#include "platform/win32/file_win32.h"
#include "platform/win32/system_error.h"

#define MAX_READ_BYTES ((size_t)1 << 30) /* of a call */

typedef struct ring {
    HANDLE file;
    HANDLE port;
    uint32_t busy_slots;                 /* bit i: slot i */
    OVERLAPPED reads[QSF_IO_MAX_DEPTH];  /* of the slots */
    size_t done_bytes[QSF_IO_MAX_DEPTH]; /* of the read in the slot */
} ring;

_Static_assert(QSF_IO_MAX_DEPTH == 32, "busy_slots has a bit for each slot");

static bool is_busy(const ring *r, uint32_t slot)
{
    return (r->busy_slots >> slot & 1) != 0;
}

static void tear_down(ring *r)
{
    if (r->port != NULL)
        (void)CloseHandle(r->port);
    if (r->file != INVALID_HANDLE_VALUE)
        (void)CloseHandle(r->file);
    (void)VirtualFree(r, 0, MEM_RELEASE);
}

static qsf_status fail_setup(const char *reason)
{
    char why[QSF_SYSTEM_ERROR_BYTES];
    qsf_system_error_text(GetLastError(), why);
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method uring (a completion port): %s: %s", reason,
                    why);
}

static qsf_status open_queue(qsf_io_queue *queue)
{
    ring *const r = VirtualAlloc(NULL, sizeof *r, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (r == NULL)
        return QSF_FAIL(QSF_ERR_NOMEM, "the system has no memory left for a completion port");
    r->file = qsf_file_reopen_direct(queue->io->file->handle);
    if (r->file != INVALID_HANDLE_VALUE)
        r->port = CreateIoCompletionPort(r->file, NULL, 0, 1);
    if (r->port == NULL) {
        const qsf_status status = fail_setup("cannot open the file for it");
        tear_down(r);
        return status;
    }
    queue->ring = r;
    return QSF_OK;
}

/* Starts the rest of the read in `slot`. Returns 0 or an error of the system. */
static DWORD submit(qsf_io_queue *queue, uint32_t slot)
{
    ring *const r = queue->ring;
    const qsf_io_read *const read = &queue->started[slot];
    /* A direct read must begin at a multiple of QSF_IO_ALIGN, so some bytes are read twice. */
    const size_t from = r->done_bytes[slot] / QSF_IO_ALIGN * QSF_IO_ALIGN;
    const size_t n_bytes = read->n_bytes - from;
    const uint64_t offset = read->off + from;
    r->reads[slot] =
        (OVERLAPPED){.Offset = (DWORD)(offset & UINT32_MAX), .OffsetHigh = (DWORD)(offset >> 32)};
    const BOOL has_ended = ReadFile(r->file, read->dst + from,
                                    (DWORD)(n_bytes < MAX_READ_BYTES ? n_bytes : MAX_READ_BYTES),
                                    NULL, &r->reads[slot]);
    const DWORD code = has_ended ? 0 : GetLastError();
    return code == ERROR_IO_PENDING ? 0 : code;
}

static void release_slot(qsf_io_queue *queue, uint32_t slot)
{
    ring *const r = queue->ring;
    r->busy_slots &= ~(UINT32_C(1) << slot);
    queue->n_started--;
}

/* Of a read that could not be started; behind the file's end Windows starts none. */
static qsf_status fail_start(const qsf_io_queue *queue, const qsf_io_read *read, size_t done_bytes,
                             DWORD code)
{
    if (code == ERROR_HANDLE_EOF)
        return qsf_io_fail_short(queue->io, read, done_bytes);
    return qsf_io_fail_system(queue->io, read, (int)code);
}

static qsf_status start_read(qsf_io_queue *queue, const qsf_io_read *read)
{
    ring *const r = queue->ring;
    uint32_t slot = 0;
    while (is_busy(r, slot))
        slot++;
    queue->started[slot] = *read;
    r->done_bytes[slot] = 0;
    r->busy_slots |= UINT32_C(1) << slot;
    queue->n_started++;
    const DWORD code = submit(queue, slot);
    if (code == 0)
        return QSF_OK;
    release_slot(queue, slot);
    return fail_start(queue, read, 0, code);
}

/* Waits for a packet. Returns the slot of its read; *code is that read's error, or 0. */
static uint32_t take_packet(ring *r, size_t *n_bytes, DWORD *code)
{
    DWORD done_bytes = 0;
    ULONG_PTR key;
    OVERLAPPED *read = NULL;
    do {
        *code = GetQueuedCompletionStatus(r->port, &done_bytes, &key, &read, INFINITE)
                    ? 0
                    : GetLastError();
    } while (read == NULL); /* the wait itself failed; reads in flight still write to memory */
    *n_bytes = done_bytes;
    return (uint32_t)(read - r->reads);
}

/* Applies a packet to the read in `slot`. *is_done is false if the rest was started again. */
static qsf_status judge(qsf_io_queue *queue, uint32_t slot, size_t n_bytes, DWORD code,
                        bool *is_done)
{
    ring *const r = queue->ring;
    const qsf_io_read *const read = &queue->started[slot];
    *is_done = true;
    if (code != 0 && code != ERROR_HANDLE_EOF)
        return qsf_io_fail_system(queue->io, read, (int)code);
    const size_t done_bytes = r->done_bytes[slot] / QSF_IO_ALIGN * QSF_IO_ALIGN + n_bytes;
    if (done_bytes >= read->need_bytes)
        return QSF_OK;
    if (done_bytes <= r->done_bytes[slot])
        return qsf_io_fail_short(queue->io, read, r->done_bytes[slot]);
    r->done_bytes[slot] = done_bytes;
    code = submit(queue, slot);
    if (code != 0)
        return fail_start(queue, read, done_bytes, code);
    *is_done = false;
    return QSF_OK;
}

static qsf_status finish_read(qsf_io_queue *queue, qsf_io_read *read)
{
    for (;;) {
        size_t n_bytes;
        DWORD code;
        const uint32_t slot = take_packet(queue->ring, &n_bytes, &code);
        bool is_done;
        const qsf_status status = judge(queue, slot, n_bytes, code, &is_done);
        if (!is_done)
            continue;
        *read = queue->started[slot];
        release_slot(queue, slot);
        return status;
    }
}

static bool has_ended(const qsf_io_queue *queue)
{
    const ring *const r = queue->ring;
    bool is_any = false;
    for (uint32_t slot = 0; slot < QSF_IO_MAX_DEPTH; slot++)
        is_any |= is_busy(r, slot) && HasOverlappedIoCompleted(&r->reads[slot]);
    return is_any;
}

static void close_queue(qsf_io_queue *queue)
{
    ring *const r = queue->ring;
    size_t n_bytes;
    DWORD code;
    for (; queue->n_started > 0; queue->n_started--)
        (void)take_packet(r, &n_bytes, &code);
    tear_down(r);
    queue->ring = NULL;
}

/* Tries a read. */
static qsf_status open_iocp(qsf_io *io)
{
    _Alignas(QSF_IO_ALIGN) unsigned char block[QSF_IO_ALIGN];
    const qsf_io_read wanted = {.dst = block, .n_bytes = sizeof block};
    qsf_io_queue queue = {.io = io, .depth = 1};
    QSF_TRY(open_queue(&queue));
    qsf_io_read had;
    qsf_status status = start_read(&queue, &wanted);
    if (status == QSF_OK)
        status = finish_read(&queue, &had);
    close_queue(&queue);
    return status == QSF_ERR_IO ? fail_setup("a trial read failed") : status;
}

static void close_nothing(qsf_io *io)
{
    (void)io;
}

static const qsf_io_queue_fns queue_fns = {
    .open = open_queue,
    .close = close_queue,
    .start = start_read,
    .finish = finish_read,
    .has_ended = has_ended,
};

const qsf_io_way qsf_io_uring_way = {
    .name = "uring",
    .open = open_iocp,
    .close = close_nothing,
    .queue_fns = &queue_fns,
};
