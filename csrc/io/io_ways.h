/* io_ways.h - the single methods behind io.h, for io.c alone.
 *
 * Each `open` fills io->direct_fd or io->map; on failure these are as they were. Each `read`
 * is complete or failed, in the calling thread. io_uring has lanes of its own instead.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_IO_IO_WAYS_H
#define QSF_IO_IO_WAYS_H

#include "io/io.h"

/* The system may read ahead of us. */
void qsf_io_buffered_advise(const qsf_io *io);

/* Opens direct_fd and tries a read through it. */
qsf_status qsf_io_direct_open(qsf_io *io);
void qsf_io_direct_close(qsf_io *io);

/* Through `fd`, which is the file's own or direct_fd. */
qsf_status qsf_io_pread(const qsf_io *io, int fd, const qsf_io_read *read);

qsf_status qsf_io_mmap_open(qsf_io *io);
void qsf_io_mmap_close(qsf_io *io);
qsf_status qsf_io_mmap_read(const qsf_io *io, const qsf_io_read *read);

/* Reads through a ring as a lane does, once; wants direct_fd. */
qsf_status qsf_io_uring_try(qsf_io *io);
qsf_status qsf_io_uring_lane_open(qsf_io_lane *lane);
void qsf_io_uring_lane_close(qsf_io_lane *lane);
qsf_status qsf_io_uring_start(qsf_io_lane *lane, const qsf_io_read *read);
qsf_status qsf_io_uring_finish(qsf_io_lane *lane, qsf_io_read *read);

/* The two ends that a read can have besides a good one. `name`: of the method. */
qsf_status qsf_io_fail_system(const char *name, const qsf_io_read *read, int system_errno);
qsf_status qsf_io_fail_short(const qsf_io *io, const qsf_io_read *read, size_t done_bytes);

#endif
