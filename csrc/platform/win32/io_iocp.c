/* io_iocp.c - direct reads that Windows performs while the thread continues: what io_uring is on
 * Linux, and the method of the same name.
 *
 * A queue has a handle of its own and a completion port, which receives a packet for each read that
 * was started, also for one that failed.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"
#include "platform/file_calls.h"
#include "platform/io_slots.h"
#include "platform/win32/file_win32.h"

#define MAX_READ_BYTES ((size_t)1 << 30) /* of a call */

typedef struct ring {
    qsf_io_slots slots;
    HANDLE file;
    HANDLE port;
    OVERLAPPED reads[QSF_IO_MAX_DEPTH]; /* of the slots */
} ring;

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
    qsf_system_error_text((int)GetLastError(), why);
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method uring (a completion port): %s: %s", reason,
                    why);
}

/* After the end of the file Windows starts no read: a packet of no bytes stands for it. */
static int submit(qsf_io_queue *queue, uint32_t slot, size_t from)
{
    ring *const r = queue->ring;
    const qsf_io_read *const read = &queue->started[slot];
    const size_t n_bytes = read->n_bytes - from;
    const uint64_t offset = read->off + from;
    r->reads[slot] =
        (OVERLAPPED){.Offset = (DWORD)(offset & UINT32_MAX), .OffsetHigh = (DWORD)(offset >> 32)};
    if (ReadFile(r->file, read->dst + from,
                 (DWORD)(n_bytes < MAX_READ_BYTES ? n_bytes : MAX_READ_BYTES), NULL,
                 &r->reads[slot]))
        return 0;
    const DWORD code = GetLastError();
    if (code == ERROR_HANDLE_EOF)
        return PostQueuedCompletionStatus(r->port, 0, 0, &r->reads[slot]) ? 0 : (int)GetLastError();
    return code == ERROR_IO_PENDING ? 0 : (int)code;
}

static int take(qsf_io_queue *queue, uint32_t *slot, size_t *n_bytes, int *error)
{
    ring *const r = queue->ring;
    DWORD done_bytes = 0;
    DWORD code;
    ULONG_PTR key;
    OVERLAPPED *read = NULL;
    do {
        code = GetQueuedCompletionStatus(r->port, &done_bytes, &key, &read, INFINITE)
                   ? 0
                   : GetLastError();
    } while (read == NULL); /* the wait itself failed; reads in flight still write to memory */
    *slot = (uint32_t)(read - r->reads);
    *n_bytes = done_bytes;
    *error = code == ERROR_HANDLE_EOF ? 0 : (int)code;
    return 0;
}

static const qsf_io_slot_fns slot_fns = {.submit = submit, .take = take};

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
    r->slots.fns = &slot_fns;
    queue->ring = r;
    return QSF_OK;
}

static bool has_ended(const qsf_io_queue *queue)
{
    const ring *const r = queue->ring;
    bool is_any = false;
    for (uint32_t slot = 0; slot < QSF_IO_MAX_DEPTH; slot++)
        is_any |= qsf_io_slot_is_busy(&r->slots, slot) && HasOverlappedIoCompleted(&r->reads[slot]);
    return is_any;
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

static qsf_status open_iocp(qsf_io *io)
{
    return qsf_io_try_queue(io, &queue_fns);
}

const qsf_io_way qsf_io_uring_way = {
    .name = "uring",
    .open = open_iocp,
    .queue_fns = &queue_fns,
};
