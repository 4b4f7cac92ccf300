/* residence.h - which units stay in memory, where there is not room for all.
 *
 * Every unit that passes through the ring is read once a token, so a byte kept is a byte saved,
 * whichever unit it belongs to. Which layers stay decides how well reading and computing overlap:
 *
 *     kept side by side    K K K K K K S S     the disk fills the ring, then waits for six layers
 *     spread               S K K K S K K K     it waits for three, twice, with a ring to fill each
 *
 * A layer of 112 MB (7B, 4 bits) is computed in 4 to 7 ms from memory (16 to 30 GB/s) and read in
 * 62 ms (1.8 GB/s). A ring of 16 MiB takes 9 ms to fill: that is one or two kept layers. The disk
 * idles for what is left of the longer runs, so runs are kept as equal as they can be, around the
 * end of the pass too, where the head and the choice of the token take their time.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_RESIDENCE_H
#define QSF_ENGINE_RESIDENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "format/records.h"

/* Marks more of the units that pass through the ring as resident, of at most room_bytes raw; the
 * head first, then layers, and at the end whatever still fits: no unit that stays unmarked
 * would. Returns their bytes. Takes time in proportion to the units. */
uint64_t qsf_residence_add(const qsf_reader *r, uint64_t room_bytes, bool *is_resident);

/* The most raw bytes that are computed from memory between two streamed units, around the end
 * of the pass too; 0 when nothing is streamed. */
uint64_t qsf_residence_longest_run_bytes(const qsf_reader *r, const bool *is_resident);

#endif
