/* machine.h - the memory and the cores of the machine that this process may use, and how fast they
 * are.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "platform/cpu.h"
#include "platform/pool.h"

typedef struct qsf_sysmem {
    uint64_t total_bytes;     /* of the machine, or the control group's limit if lower */
    uint64_t available_bytes; /* MemAvailable, or memory left in the control group or in the
                               * addresses of a process if lower */
    uint64_t limit_bytes;     /* control group's limit if it sets available_bytes; else 0 */
    uint64_t resident_bytes;  /* of this process now */
    uint64_t peak_bytes;      /* highest resident memory of this process so far */
} qsf_sysmem;

/* Never fails: a number that the system does not report is 0. */
void qsf_sysmem_read(qsf_sysmem *out);

/* Physical cores that this process may use, or fewer if its control group limits processor time; at
 * least 1. */
uint32_t qsf_core_count(void);

/* ---- how fast the memory is read, measured with simple loops ---- */

/* Reads n_bytes (a multiple of 512) once, in ascending order. The result only keeps the compiler
 * from removing the loop. */
typedef uint64_t qsf_roofline_read_fn(const unsigned char *p, size_t n_bytes);

/* The reader with the widest loads of this machine. */
qsf_roofline_read_fn *qsf_roofline_reader(void);

/* Highest rate, in bytes per second, at which all threads of the pool read bytes [n_bytes]. Each
 * reads its own part, as one ascending stream or as several in turn, whichever is faster. Takes the
 * best pass within about n_ms, at least one pass of each kind. n_bytes >= 64 KiB a thread; use more
 * than all caches hold. */
double qsf_roofline_read_rate(qsf_pool *pool, unsigned char *bytes, size_t n_bytes, uint32_t n_ms);
