/* pace.h - how many reads are in flight: climbs to the number at which the disk is fastest.
 *
 * Some disks are fastest with one read in flight, others with eight, and a disk that others use
 * changes. So numbers are compared in turns while weights stream: present, other, present, other.
 * Only bytes a second decide, and only how fast the same bytes arrive depends on it.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qsf_pace {
    uint32_t limit;   /* reads that may be in flight now */
    uint32_t most;    /* of the limit */
    uint32_t best;    /* the present number; 0: the limit is fixed */
    bool is_rising;   /* the other number is twice the best one, else half of it */
    uint32_t n_turns; /* of this comparison */
    uint32_t n_idle;  /* measurements to the next comparison, the last such number next */
    uint32_t idle;
    double speeds[2]; /* sums: of the best, of the other */
    /* the measurement */
    uint32_t n_reads; /* that ended; the first `most` were started under the limit before it */
    uint32_t n_disturbed;
    uint64_t n_bytes;
    uint64_t begin_ns;
} qsf_pace;

/* Up to `most` reads in flight; with is_fixed that many always. */
void qsf_pace_init(qsf_pace *p, uint32_t most, bool is_fixed);

/* A read of n_bytes ended. Returns true if the limit has changed. */
bool qsf_pace_count(qsf_pace *p, size_t n_bytes, uint64_t now_ns);

/* Something else than the disk holds up the reads: the measurement begins again. After many such
 * the number that is tried gives way to the best one. */
void qsf_pace_disturb(qsf_pace *p);
