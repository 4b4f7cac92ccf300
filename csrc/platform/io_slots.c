/* io_slots.c - the arithmetic of io_slots.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/io_slots.h"

#include <stdio.h>

#include "base/status.h"

_Static_assert(QSF_IO_MAX_DEPTH == 32, "`busy` has a bit for each slot");

static void release(qsf_io_queue *queue, uint32_t slot)
{
    qsf_io_slots *const s = queue->ring;
    s->busy &= ~(UINT32_C(1) << slot);
    queue->n_started--;
}

/* Submits the rest of the read in `slot`. */
static int submit_rest(qsf_io_queue *queue, uint32_t slot)
{
    const qsf_io_slots *const s = queue->ring;
    /* A direct read must begin at a multiple of QSF_IO_ALIGN, so some bytes are read twice. */
    return s->fns->submit(queue, slot, s->done_bytes[slot] / QSF_IO_ALIGN * QSF_IO_ALIGN);
}

qsf_status qsf_io_slots_start(qsf_io_queue *queue, const qsf_io_read *read)
{
    qsf_io_slots *const s = queue->ring;
    uint32_t slot = 0;
    while (qsf_io_slot_is_busy(s, slot))
        slot++;
    queue->started[slot] = *read;
    s->done_bytes[slot] = 0;
    s->busy |= UINT32_C(1) << slot;
    queue->n_started++;
    const int error = submit_rest(queue, slot);
    if (error == 0)
        return QSF_OK;
    release(queue, slot);
    return qsf_io_fail_system(queue->io, read, error);
}

/* Applies the end of a read in `slot`. *is_done is false if the rest was submitted again. */
static qsf_status judge(qsf_io_queue *queue, uint32_t slot, size_t n_bytes, int error,
                        bool *is_done)
{
    qsf_io_slots *const s = queue->ring;
    const qsf_io_read *const read = &queue->started[slot];
    *is_done = true;
    if (error != 0 && error != QSF_IO_AGAIN)
        return qsf_io_fail_system(queue->io, read, error);
    if (error == 0) {
        const size_t done_bytes = s->done_bytes[slot] / QSF_IO_ALIGN * QSF_IO_ALIGN + n_bytes;
        if (done_bytes >= read->need_bytes)
            return QSF_OK;
        if (done_bytes <= s->done_bytes[slot])
            return qsf_io_fail_short(queue->io, read, s->done_bytes[slot]);
        s->done_bytes[slot] = done_bytes;
    }
    error = submit_rest(queue, slot);
    if (error != 0)
        return qsf_io_fail_system(queue->io, read, error);
    *is_done = false;
    return QSF_OK;
}

qsf_status qsf_io_slots_finish(qsf_io_queue *queue, qsf_io_read *read)
{
    const qsf_io_slots *const s = queue->ring;
    for (;;) {
        uint32_t slot = 0;
        size_t n_bytes = 0;
        int error = 0;
        bool is_done = true;
        const int wait_error = s->fns->take(queue, &slot, &n_bytes, &error);
        qsf_status status;
        if (wait_error == 0) {
            status = judge(queue, slot, n_bytes, error, &is_done);
        } else { /* the state of all reads is unknown; report any one */
            for (slot = 0; !qsf_io_slot_is_busy(s, slot);)
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

void qsf_io_slots_drain(qsf_io_queue *queue)
{
    const qsf_io_slots *const s = queue->ring;
    uint32_t slot;
    size_t n_bytes;
    int error;
    while (queue->n_started > 0 && s->fns->take(queue, &slot, &n_bytes, &error) == 0)
        queue->n_started--;
}

qsf_status qsf_io_try_queue(qsf_io *io, const qsf_io_queue_fns *fns)
{
    _Alignas(QSF_IO_ALIGN) unsigned char block[QSF_IO_ALIGN];
    const qsf_io_read wanted = {.dst = block, .n_bytes = sizeof block};
    qsf_io_queue queue = {.io = io, .depth = 1};
    QSF_TRY(fns->open(&queue));
    qsf_io_read had;
    qsf_status status = fns->start(&queue, &wanted);
    if (status == QSF_OK)
        status = fns->finish(&queue, &had);
    fns->close(&queue);
    if (status != QSF_ERR_IO)
        return status;
    char why[160]; /* the file is readable by other methods */
    snprintf(why, sizeof why, "%s", qsf_error_detail());
    return QSF_FAIL(QSF_ERR_UNSUPPORTED, "I/O method %s: a trial read failed: %s", io->way->name,
                    why);
}
