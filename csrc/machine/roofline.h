/* roofline.h - what a machine can do at most: bytes read from memory and multiply-adds of
 * integers, measured with the plainest loops there are.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MACHINE_ROOFLINE_H
#define QSF_MACHINE_ROOFLINE_H

#include <stddef.h>
#include <stdint.h>

#include "platform/cpu.h"
#include "platform/pool.h"

/* Reads n_bytes (a multiple of 512) once, in ascending order. What it returns is only there so
 * that it reads. */
typedef uint64_t qsf_roofline_read_fn(const unsigned char *p, size_t n_bytes);

/* n_rounds rounds of independent multiply-adds of bytes; returns how many of these there were. */
typedef double qsf_roofline_madds_fn(size_t n_rounds);

/* With the widest loads that this machine has. */
qsf_roofline_read_fn *qsf_roofline_reader(void);

/* The multiply-adds of a level that this machine has; NULL where there is no such loop. */
qsf_roofline_madds_fn *qsf_roofline_madds(qsf_isa isa);

/* Bytes a second that all threads of the pool read from bytes [n_bytes] at most, each from a part
 * of its own that it has touched first: as one stream of ascending addresses or as several by
 * turns, whichever is faster. The best pass of about n_ms, but one of each way at least.
 * n_bytes >= 64 KiB a thread, and larger than all caches for the result to mean anything. */
double qsf_roofline_read_rate(qsf_pool *pool, unsigned char *bytes, size_t n_bytes, uint32_t n_ms);

/* Multiply-adds of bytes a second of all threads at most, of the best pass of about n_ms; 0 where
 * the level has no loop for it. */
double qsf_roofline_madd_rate(qsf_pool *pool, qsf_isa isa, uint32_t n_ms);

#endif
