/* dtype.c - the table behind dtype.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/dtype.h"

typedef struct dtype_row {
    const char *name;
    size_t tile_bytes;
    size_t scalar_bytes;
    bool is_quantised;
    bool has_min;
} dtype_row;

/* tile_bytes = 16 rows x (2 bytes of scale [+ 2 of min] + 64 codes). ternary-dense stores 64
 * codes in 13 bytes: five codes a byte. */
static const dtype_row rows[QSF_DTYPE_COUNT] = {
    [QSF_DTYPE_2BIT_SYM] = {"2bit-sym", 288, 0, true, false},
    [QSF_DTYPE_2BIT] = {"2bit", 320, 0, true, true},
    [QSF_DTYPE_3BIT] = {"3bit", 448, 0, true, true},
    [QSF_DTYPE_4BIT] = {"4bit", 576, 0, true, true},
    [QSF_DTYPE_TERNARY] = {"ternary", 288, 0, true, false},
    [QSF_DTYPE_MIXED] = {"mixed", 0, 0, false, false},
    [QSF_DTYPE_8BIT] = {"8bit", 1056, 0, true, false},
    [QSF_DTYPE_F16] = {"f16", 2048, 2, false, false},
    [QSF_DTYPE_F32] = {"f32", 4096, 4, false, false},
    [QSF_DTYPE_TERNARY_DENSE] = {"ternary-dense", 240, 0, true, false},
    [QSF_DTYPE_4BIT_SYM] = {"4bit-sym", 544, 0, true, false},
};

const char *qsf_dtype_name(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT ? rows[dtype].name : "unknown";
}

size_t qsf_dtype_tile_bytes(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT ? rows[dtype].tile_bytes : 0;
}

size_t qsf_dtype_scalar_bytes(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT ? rows[dtype].scalar_bytes : 0;
}

bool qsf_dtype_is_quantised(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT && rows[dtype].is_quantised;
}

bool qsf_dtype_has_min(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT && rows[dtype].has_min;
}
