/* own.h - embeddings of each layer (Gemma 4 E2B, E4B).
 *
 * A token has an embedding for the residual and one of own_width numbers for each layer: a row of
 * the own table has those of all layers. A pass needs few rows of the large table, so it stays in
 * the file: a row costs a read of its band of 16 rows.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "model/ops.h"

/* Stores x, the embedding of tokens [n_tokens], and reads their rows of the table. Errors of the
 * stream. */
qsf_status qsf_own_read(qsf_ops *o, const qsf_tensor *table, const uint32_t *tokens);

/* p = (norm(in @ embedding / sqrt(dim)) + own embedding * sqrt(own_width)) / sqrt(2);
 * x += norm(out @ (activation(gate @ x) * p)) for the rows of the chunk. Errors of the stream. */
qsf_status qsf_own_run(qsf_ops *o, const qsf_layer *l);
