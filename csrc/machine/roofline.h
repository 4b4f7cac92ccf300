/* roofline.h - measures the limits of a machine with simple loops: bytes read from memory and
 * integer multiply-adds.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "platform/cpu.h"
#include "platform/pool.h"

/* Reads n_bytes (a multiple of 512) once, in ascending order. The result only keeps the compiler
 * from removing the loop. */
typedef uint64_t qsf_roofline_read_fn(const unsigned char *p, size_t n_bytes);

/* Performs n_rounds rounds of independent multiply-adds of bytes; returns the number of them. */
typedef double qsf_roofline_madds_fn(size_t n_rounds);

/* The reader with the widest loads of this machine. */
qsf_roofline_read_fn *qsf_roofline_reader(void);

/* The multiply-add loop of a level that this machine has; NULL if the level has none. */
qsf_roofline_madds_fn *qsf_roofline_madds(qsf_isa isa);

/* Highest rate, in bytes per second, at which all threads of the pool read bytes [n_bytes]. Each
 * reads its own part, as one ascending stream or as several in turn, whichever is faster. Takes the
 * best pass within about n_ms, at least one pass of each kind. n_bytes >= 64 KiB a thread; use more
 * than all caches hold. */
double qsf_roofline_read_rate(qsf_pool *pool, unsigned char *bytes, size_t n_bytes, uint32_t n_ms);

/* Highest rate, in multiply-adds of bytes per second, of all threads: the best pass within about
 * n_ms; 0 if the level has no loop. */
double qsf_roofline_madd_rate(qsf_pool *pool, qsf_isa isa, uint32_t n_ms);
