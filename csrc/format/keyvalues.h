/* keyvalues.h - the key-values of the sections ARCH and KIND: docs/format.md, section 6. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "format/records.h"

enum qsf_value_type { QSF_VALUE_U32 = 1, QSF_VALUE_F32 = 2, QSF_VALUE_F32_ARRAY = 3 };

/* A key that this build knows. An f32 must be above 0, the values of an array 0 or more. */
typedef struct qsf_key {
    uint16_t number;
    uint8_t type;
    const char *name;
    size_t field_off; /* in the record: of the uint32_t, float or qsf_floats */
    uint32_t least;   /* of a u32 */
    uint32_t most;
} qsf_key;

/* Sets the fields of `record` to the values in bytes [n_bytes]; fields without a value keep theirs.
 * Arrays stay in `bytes`, aligned to 4, and are converted to the machine's byte order. `where`
 * names the section in error texts. QSF_ERR_FORMAT; QSF_ERR_UNSUPPORTED: an unknown key that a
 * reader must not skip. */
qsf_status qsf_keyvalues_parse(const char *where, unsigned char *bytes, size_t n_bytes,
                               const qsf_key *keys, size_t n_keys, void *record);

/* Turns n f32 values at a multiple of 4 into the machine's byte order. */
qsf_floats qsf_floats_in_place(unsigned char *bytes, uint32_t n);
