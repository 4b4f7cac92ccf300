/* mixers.c - the table of mixers. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/mixers/mixers.h"

const qsf_mixer qsf_mixers[QSF_MIXER_COUNT] = {
    [QSF_MIXER_ATTENTION] = {qsf_mix_attention, NULL},
    [QSF_MIXER_SHORT_CONV] = {qsf_mix_conv, qsf_mix_conv_describe},
    [QSF_MIXER_DELTA] = {qsf_mix_delta, qsf_heads_describe},
    [QSF_MIXER_SSD] = {qsf_mix_ssd, qsf_heads_describe},
    [QSF_MIXER_ATTENTION_AND_SSD] = {qsf_mix_attention_and_ssd, qsf_heads_describe},
    [QSF_MIXER_NONE] = {0},
    [QSF_MIXER_RELATIVE] = {qsf_mix_relative, qsf_mix_relative_describe},
};

void qsf_mixers_describe_state(const qsf_config *c, uint32_t layer, qsf_state_layer *out)
{
    const qsf_mixer *const m = &qsf_mixers[c->layers[layer].kind->mixer];
    if (m->describe_state != NULL)
        m->describe_state(c, layer, out);
}
