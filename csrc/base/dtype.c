/* dtype.c - the table behind dtype.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/dtype.h"

typedef struct dtype_row {
    const char *name;
    size_t scalar_bytes;
    bool is_quantised;
    bool has_min;
} dtype_row;

static const dtype_row rows[QSF_DTYPE_COUNT] = {
    [QSF_DTYPE_2BIT_SYM] = {"2bit-sym", 0, true, false},
    [QSF_DTYPE_2BIT] = {"2bit", 0, true, true},
    [QSF_DTYPE_3BIT] = {"3bit", 0, true, true},
    [QSF_DTYPE_4BIT] = {"4bit", 0, true, true},
    [QSF_DTYPE_TERNARY] = {"ternary", 0, true, false},
    [QSF_DTYPE_MIXED] = {"mixed", 0, false, false},
    [QSF_DTYPE_8BIT] = {"8bit", 0, true, false},
    [QSF_DTYPE_F16] = {"f16", 2, false, false},
    [QSF_DTYPE_F32] = {"f32", 4, false, false},
    [QSF_DTYPE_TERNARY_DENSE] = {"ternary-dense", 0, true, false},
    [QSF_DTYPE_4BIT_SYM] = {"4bit-sym", 0, true, false},
    [QSF_DTYPE_MXFP4] = {"mxfp4", 0, true, false},
};

const char *qsf_dtype_name(uint32_t dtype)
{
    return dtype < QSF_DTYPE_COUNT ? rows[dtype].name : "unknown";
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
