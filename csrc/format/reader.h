/* reader.h - opens a .qsf file and checks its whole directory before anything trusts it.
 *
 * qsf_reader_open checks every number of records.h against docs/format.md. It reads no weights.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/records.h"

/* On failure nothing is held and the reader is closed. reads_until_fault: as in qsf_file; -1
 * outside of tests. Errors: QSF_ERR_IO, _FORMAT, _UNSUPPORTED, _NOMEM. */
qsf_status qsf_reader_open(qsf_reader *r, qsf_ledger *ledger, const char *path,
                           int64_t reads_until_fault);
/* Accepts a reader that is zeroed, closed or half-open. */
void qsf_reader_close(qsf_reader *r);

/* Removes layers from the pass: pass_units and layer_units. The other records stay, and units keep
 * their numbers. is_left_out [n_layers of the header]: at least one layer must stay. */
void qsf_reader_leave_out(qsf_reader *r, const bool *is_left_out);
