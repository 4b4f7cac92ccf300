/* own.h - embeddings that each layer has of its own (Gemma 4 E2B, E4B).
 *
 * Beside the embedding that begins the residual, a token has one for each layer, of own_width
 * numbers: a row of the own table has those of all layers. The table is far larger than what a pass
 * needs of it, so it stays in the file: a row costs a read of its band of 16 rows.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_MODEL_OWN_H
#define QSF_MODEL_OWN_H

#include "model/ops.h"

/* Keeps x, the embedding of tokens [n_tokens], and reads their rows of the table. Errors of the
 * stream. */
qsf_status qsf_own_read(qsf_ops *o, const qsf_tensor *table, const uint32_t *tokens);

/* p = (norm(in @ embedding / sqrt(dim)) + own embedding * sqrt(own_width)) / sqrt(2);
 * x += norm(out @ (activation(gate @ x) * p)) for the rows of the chunk. Errors of the stream. */
qsf_status qsf_own_run(qsf_ops *o, const qsf_layer *l);

#endif
