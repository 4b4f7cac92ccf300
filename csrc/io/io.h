/* io.h - reads of one file, started first and finished later, by one of several methods.
 *
 * A qsf_io is a file opened for a method; it is shared by threads. A qsf_io_queue belongs to
 * one thread and has up to `depth` reads under way: one with the methods that read in the
 * calling thread (then reads at the same time take as many queues), all of them with io_uring.
 *
 *     method     past the page cache   reads under way at the same time
 *     buffered   no                    one a queue
 *     direct     yes                   one a queue
 *     uring      yes                   depth of the queue
 *     mmap       no                    one a queue; a read copies, so that what was verified is
 *                                      what is computed with, and a file that shrinks is an
 *                                      error, not a signal
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_IO_IO_H
#define QSF_IO_IO_H

#include <stdint.h>

#include "io/io_way.h"

/* A method and how many reads are under way at the same time. */
typedef struct qsf_io_setup {
    uint32_t method; /* a qsf_io_method, not AUTO */
    uint32_t depth;  /* 1 .. QSF_IO_MAX_DEPTH */
} qsf_io_setup;

/* Opens `file` for a method. QSF_ERR_UNSUPPORTED: the system, the file system or a sandbox does
 * not let us; the text says which. Tries a read, so that later ones do not fail for that reason. */
qsf_status qsf_io_open(qsf_io *io, qsf_file *file, uint32_t method);
void qsf_io_close(qsf_io *io); /* zeroed or closed is fine */

/* Never NULL: "buffered", "direct", "uring", "mmap", "auto". */
const char *qsf_io_method_name(uint32_t method);

/* For processes in a memory control group: from now on the kernel does not read ahead. Its window
 * (8 MB on some disks, twice that for sequential reads) is locked in the page cache until it has
 * come; a group that is full of locked pages has nothing to reclaim, and its process is killed.
 * Elsewhere readahead stays, as it fills the page cache with larger pages. */
void qsf_io_stop_readahead(const qsf_io *io);

/* Bytes of the page cache that `depth` reads under way then keep locked, so that the kernel cannot
 * reclaim them; 0 past the page cache. AUTO may become buffered, and counts as that. */
uint64_t qsf_io_locked_bytes(uint32_t method, uint32_t depth);

/* Queues (threads) that bring so many reads under way, and the depth of each. */
uint32_t qsf_io_queue_count(const qsf_io_setup *setup);
uint32_t qsf_io_queue_depth(const qsf_io_setup *setup);

qsf_status qsf_io_queue_open(qsf_io_queue *queue, qsf_io *io, uint32_t depth);
/* Waits for what is under way, from any thread, and forgets it; nothing is written to any dst
 * afterwards. Zeroed or closed is fine. */
void qsf_io_queue_close(qsf_io_queue *queue);

/* Begins a read; fewer than `depth` are under way. With the methods that read in the calling
 * thread, only finishing does the work. */
qsf_status qsf_io_start(qsf_io_queue *queue, const qsf_io_read *read);

/* Waits until one of the reads under way is done and says which, also when that one failed. Its
 * status: QSF_OK, QSF_ERR_IO (the system refused), QSF_ERR_FORMAT (the file ends before
 * need_bytes). Short reads and EINTR are dealt with here. At least one is under way. Counts as a
 * read of the file: a fault that a test asks for comes here. */
qsf_status qsf_io_finish(qsf_io_queue *queue, qsf_io_read *read);

#endif
