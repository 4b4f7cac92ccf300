/* qsf.h - the public C API of the QSF engine; an application includes only this header.
 *
 * A model is opened from one .qsf file inside a memory budget. Any number of sessions share
 * it. A session holds one sequence of tokens and its KV cache. The caller passes the whole
 * sequence each time; the engine keeps the common prefix and evaluates the rest.
 *
 * These rules hold for every function unless its comment says otherwise:
 *   - A function returns QSF_OK or a negative qsf_status. After an error, qsf_error_detail()
 *     returns a text that explains it.
 *   - *_open and *_create give the caller ownership. The matching *_close or *_destroy
 *     releases it, accepts NULL and cannot fail.
 *   - Handles may be closed in any order. A model stays alive until its last session is
 *     destroyed.
 *   - The engine uses a pointer argument only until the call returns.
 *   - Sizes are in bytes unless the name says tokens, rows, floats or layers.
 *   - Several threads may share a qsf_model; their sessions take turns. Only one thread at
 *     a time may use a qsf_session, except for qsf_session_cancel().
 *   - The engine prints nothing, changes no signal handler and never ends the process.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_H
#define QSF_H

#include "qsf_library.h" /* cffi reads the parts in this order */
#include "qsf_model.h"
#include "qsf_session.h"
#include "qsf_pass.h"
#include "qsf_state.h"
#include "qsf_stats.h"
#include "qsf_text.h"
#include "qsf_rounding.h"

#endif
