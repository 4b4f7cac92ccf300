/* header_alone.c - the public header needs nothing before it, as C. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "qsf.h"

_Static_assert(QSF_OK == 0, "success is zero");
_Static_assert(sizeof(qsf_options) > 0, "the options are a complete type");
