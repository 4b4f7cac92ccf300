/* int_form.h - properties of each quantised type in the integer form. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_KERNELS_INT_FORM_H
#define QSF_KERNELS_INT_FORM_H

#include <stdbool.h>

#include "base/dtype.h"
#include "kernels/forced_inline.h"

/* For a symmetric type, the weight is (factor * code - zero) * unit * scale. */
typedef struct int_form {
    qsf_dtype dtype;
    bool has_min;
    int32_t factor;
    int32_t zero;
    float unit;
} int_form;

/* A literal after inlining, if dtype is one. */
QSF_FORCED_INLINE int_form int_form_of(qsf_dtype dtype)
{
    if (dtype == QSF_DTYPE_2BIT || dtype == QSF_DTYPE_3BIT || dtype == QSF_DTYPE_4BIT)
        return (int_form){dtype, true, 1, 0, 1.0F};
    if (dtype == QSF_DTYPE_2BIT_SYM)
        return (int_form){dtype, false, 2, 3, 0.5F};
    if (dtype ==
        QSF_DTYPE_MXFP4) /* codes are looked up: value + 12 where they must not be negative */
        return (int_form){dtype, false, 1, 12, 1.0F};
    if (dtype == QSF_DTYPE_4BIT_SYM)
        return (int_form){dtype, false, 1, 8, 1.0F};
    return (int_form){dtype, false, 1, dtype == QSF_DTYPE_8BIT ? 128 : 1, 1.0F};
}

#endif
