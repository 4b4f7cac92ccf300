/* angles.c - frequencies and angles of RoPE. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "model/angles.h"

#include <math.h>

/* Llama 3: divides long wavelengths by the factor, keeps short ones, and blends those in between.
 * Source: the rope_scaling rule published with the Llama 3.1 models. */
static double scale_llama3(const qsf_arch *a, double frequency)
{
    const double two_pi = 6.283185307179586;
    const double wavelength = two_pi / frequency;
    const double original = a->rope_original_tokens;
    if (wavelength > original / (double)a->rope_low_freq_factor)
        return frequency / (double)a->rope_factor;
    if (wavelength < original / (double)a->rope_high_freq_factor)
        return frequency;
    const double blend = (original / wavelength - (double)a->rope_low_freq_factor) /
                         ((double)a->rope_high_freq_factor - (double)a->rope_low_freq_factor);
    return (1.0 - blend) * frequency / (double)a->rope_factor + blend * frequency;
}

/* Makes the set of a file without the section ROPE. */
static void choose_own(const qsf_reader *r, uint32_t n_pairs, float *own, qsf_rope *rope)
{
    const qsf_arch *const a = &r->arch;
    *rope = (qsf_rope){
        .is_interleaved = a->rope_interleaved != 0,
        .n_pairs = n_pairs,
        .factor = 1.0F,
        .frequencies = own,
    };
    for (uint32_t i = 0; i < n_pairs; i++) {
        double frequency =
            1.0 / pow((double)r->header.rope_theta, 2.0 * (double)i / (double)(2 * n_pairs));
        if (a->rope_scaling == QSF_ROPE_SCALING_LINEAR)
            frequency /= (double)a->rope_factor;
        else if (a->rope_scaling == QSF_ROPE_SCALING_LLAMA3)
            frequency = scale_llama3(a, frequency);
        own[i] = (float)frequency;
    }
}

void qsf_ropes_choose(const qsf_config *c, const qsf_reader *r, uint32_t ctx_tokens, float *own,
                      qsf_rope *ropes)
{
    if (c->n_own_pairs != 0)
        choose_own(r, c->n_own_pairs, own, &ropes[0]);
    size_t first_pair = 0;
    for (uint32_t i = 0; i < r->n_rope_sets; i++) { /* by number and least context */
        const qsf_rope_set *const s = &r->rope_sets[i];
        if (s->least_context > ctx_tokens)
            continue;
        if (s->least_context == 0 && i > 0)
            first_pair += r->rope_sets[i - 1].frequencies.n;
        ropes[s->number] = (qsf_rope){
            .is_interleaved = s->is_interleaved,
            .n_pairs = s->frequencies.n,
            .first_pair = first_pair,
            .factor = s->factor,
            .frequencies = s->frequencies.values,
        };
    }
}

/* A table of all positions would cost memory that weights can use. The product is rounded to f32,
 * as in the reference implementations. */
void qsf_ropes_fill(const qsf_rope *ropes, uint32_t n_ropes, const uint32_t *positions,
                    uint32_t n_tokens, size_t chunk_tokens, float *rope_cos, float *rope_sin)
{
    for (uint32_t i = 0; i < n_ropes; i++) {
        const qsf_rope *const rope = &ropes[i];
        for (uint32_t t = 0; t < n_tokens; t++) {
            const size_t row = chunk_tokens * rope->first_pair + t * rope->n_pairs;
            for (size_t j = 0; j < rope->n_pairs; j++) {
                const float angle = (float)positions[t] * rope->frequencies[j];
                rope_cos[row + j] = (float)cos((double)angle) * rope->factor;
                rope_sin[row + j] = (float)sin((double)angle) * rope->factor;
            }
        }
    }
}
