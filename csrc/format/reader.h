/* reader.h - opens a .qsf file and checks its whole directory before anything trusts it.
 *
 * After qsf_reader_open every number of records.h has been checked against docs/format.md;
 * weights have not been touched.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_FORMAT_READER_H
#define QSF_FORMAT_READER_H

#include "format/records.h"

/* On failure nothing is held and the reader is closed. reads_until_fault: as in
 * qsf_file; -1 in earnest. Errors: QSF_ERR_IO, _FORMAT, _UNSUPPORTED, _NOMEM. */
qsf_status qsf_reader_open(qsf_reader *r, qsf_ledger *ledger, const char *path,
                           int64_t reads_until_fault);
/* Accepts a reader that is zeroed, closed or half-open. */
void qsf_reader_close(qsf_reader *r);

/* Takes layers away, as if the file did not have them: units and the header's number of layers
 * close up, and nothing that uses the reader afterwards comes to see or read them. Tensors stay
 * where they are; what names a unit by its number asks for the tensors anew. Not for a reader that
 * is to be verified. is_left_out [n_layers]: at least one stays. */
void qsf_reader_leave_out(qsf_reader *r, const bool *is_left_out);

#endif
