/* synthetic_units.h - the index of a model that exists nowhere: units of any size, for plans. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_SYNTHETIC_UNITS_H
#define QSF_TESTS_SYNTHETIC_UNITS_H

#include <assert.h>

#include "types/dtype.h"
#include "format/records.h"

#define SYNTHETIC_MAX_UNITS (4096 + 2)

typedef struct synthetic_units {
    qsf_reader reader;
    qsf_unit units[SYNTHETIC_MAX_UNITS];
    qsf_tensor tensors[SYNTHETIC_MAX_UNITS];
    uint32_t pass_units[SYNTHETIC_MAX_UNITS];
    qsf_layer_kind kind; /* of all layers: without experts */
} synthetic_units;

/* All of unit_bytes, uncompressed, with one matrix of rows of 4096 each. */
static inline void synthetic_make(synthetic_units *s, uint32_t n_layers, uint64_t unit_bytes,
                                  bool is_tied)
{
    assert(n_layers + 2 <= SYNTHETIC_MAX_UNITS);
    const uint32_t n_units = n_layers + 2;
    for (uint32_t i = 0; i < n_units; i++) {
        s->units[i] = (qsf_unit){.role = i == 0              ? QSF_UNIT_EMBEDDING
                                         : i == n_layers + 1 ? QSF_UNIT_FINAL
                                                             : QSF_UNIT_LAYER,
                                 .template_idx = i,
                                 .stored_bytes = unit_bytes,
                                 .raw_bytes = unit_bytes,
                                 .first_tensor = i,
                                 .n_tensors = 1};
        s->pass_units[i] = i;
        s->tensors[i] = (qsf_tensor){.unit_idx = i,
                                     .type = i == 0 ? QSF_TENSOR_EMBEDDING : QSF_TENSOR_Q,
                                     .n_rows = 4096,
                                     .n_cols = 4096,
                                     .dtype = QSF_DTYPE_4BIT,
                                     .layout = QSF_LAYOUT_TILES,
                                     .data_off = 64};
    }
    s->reader = (qsf_reader){.n_units = n_units,
                             .n_stream_units = n_units,
                             .n_pass_units = n_units,
                             .n_pass_layers = n_layers,
                             .final_unit = n_layers + 1,
                             .pass_units = s->pass_units,
                             .layer_units = s->pass_units + 1,
                             .n_tensors = n_units,
                             .units = s->units,
                             .tensors = s->tensors,
                             .kinds = &s->kind,
                             .n_kinds = 1,
                             .arch = {.tied_head = is_tied},
                             .header = {.n_layers = n_layers}};
}

#endif
