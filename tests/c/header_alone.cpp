/* header_alone.cpp - the public header needs nothing before it, as C++. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "qsf.h"

static_assert(QSF_OK == 0, "success is zero");
static_assert(sizeof(qsf_options) > 0, "the options are a complete type");
