/* options.h - checks the options of a model. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_ENGINE_OPTIONS_H
#define QSF_ENGINE_OPTIONS_H

#include "include/qsf.h"

/* QSF_ERR_ARG names the option that is out of range. */
qsf_status qsf_options_check(const qsf_options *opt);

#endif
