/* options.h - checks the options of a model. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "include/qsf.h"

/* QSF_ERR_ARG names the option that is out of range. */
qsf_status qsf_options_check(const qsf_options *opt);
