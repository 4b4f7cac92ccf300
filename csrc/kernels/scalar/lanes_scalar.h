/* lanes_scalar.h - 16 floats in plain C: the specification of every lane operation.
 *
 * vecops_tmpl.h, attend_tmpl.h and matmul_float_tmpl.h are written over these operations
 * and compiled once per instruction set; the other lanes_*.h provide the same functions. Each is
 * exact or rounded once per lane, so all give the same bits (a NaN is NaN in all, with any bits).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define QSF_LANES 16

typedef struct lanes {
    float at[QSF_LANES];
} lanes;

static inline lanes lanes_set(float value)
{
    lanes v;
    for (size_t l = 0; l < QSF_LANES; l++)
        v.at[l] = value;
    return v;
}

/* p [16] */
static inline lanes lanes_load(const float *p)
{
    lanes v;
    memcpy(v.at, p, sizeof v.at);
    return v;
}

/* p [n], n <= 16; the other lanes are +0 */
static inline lanes lanes_load_part(const float *p, size_t n)
{
    lanes v = lanes_set(0.0F);
    memcpy(v.at, p, n * sizeof *p);
    return v;
}

static inline void lanes_store(float *p, lanes v)
{
    memcpy(p, v.at, sizeof v.at);
}

/* Writes p [n], n <= 16. */
static inline void lanes_store_part(float *p, lanes v, size_t n)
{
    memcpy(p, v.at, n * sizeof *p);
}

/* p: 16 halves */
static inline lanes lanes_load_f16(const unsigned char *p)
{
    lanes v;
    for (size_t l = 0; l < QSF_LANES; l++)
        v.at[l] = qsf_half_to_float(qsf_load_u16(p + 2 * l));
    return v;
}

/* p: 16 bytes */
static inline lanes lanes_load_u8(const unsigned char *p)
{
    lanes v;
    for (size_t l = 0; l < QSF_LANES; l++)
        v.at[l] = p[l];
    return v;
}

/* p: 16 halves; rounds to nearest even */
static inline void lanes_store_f16(unsigned char *p, lanes v)
{
    for (size_t l = 0; l < QSF_LANES; l++)
        qsf_store_u16(p + 2 * l, qsf_half_from_float(v.at[l]));
}

/* An operation on each lane alike: a OP b */
#define LANES_OF_2(name, op)                   \
    static inline lanes name(lanes a, lanes b) \
    {                                          \
        for (size_t l = 0; l < QSF_LANES; l++) \
            a.at[l] = a.at[l] op b.at[l];      \
        return a;                              \
    }

LANES_OF_2(lanes_add, +)
LANES_OF_2(lanes_sub, -)
LANES_OF_2(lanes_mul, *)
LANES_OF_2(lanes_div, /)

/* a * b + c, rounded once */
static inline lanes lanes_fma(lanes a, lanes b, lanes c)
{
    for (size_t l = 0; l < QSF_LANES; l++)
        a.at[l] = qsf_fmaf(a.at[l], b.at[l], c.at[l]);
    return a;
}

/* a > b ? a : b, so b if either is NaN */
static inline lanes lanes_max(lanes a, lanes b)
{
    for (size_t l = 0; l < QSF_LANES; l++)
        a.at[l] = a.at[l] > b.at[l] ? a.at[l] : b.at[l];
    return a;
}

/* a < b ? a : b, so b if either is NaN */
static inline lanes lanes_min(lanes a, lanes b)
{
    for (size_t l = 0; l < QSF_LANES; l++)
        a.at[l] = a.at[l] < b.at[l] ? a.at[l] : b.at[l];
    return a;
}

static inline lanes lanes_abs(lanes a)
{
    for (size_t l = 0; l < QSF_LANES; l++)
        a.at[l] = fabsf(a.at[l]);
    return a;
}

/* a < b ? yes : no */
static inline lanes lanes_where_less(lanes a, lanes b, lanes yes, lanes no)
{
    for (size_t l = 0; l < QSF_LANES; l++)
        a.at[l] = a.at[l] < b.at[l] ? yes.at[l] : no.at[l];
    return a;
}

/* Lanes begin .. end - 1 of `in`, the others of `out`; begin <= end <= 16. */
static inline lanes lanes_between(size_t begin, size_t end, lanes in, lanes out)
{
    for (size_t l = begin; l < end; l++)
        out.at[l] = in.at[l];
    return out;
}

/* v * 2^n, rounded once, where shifted = n + 1.5 * 2^23 and -152 <= n <= 132. Multiplies by two
 * factors, the first of them exactly, because 2^n alone may be outside the range of float. */
static inline lanes lanes_times_pow2(lanes v, lanes shifted)
{
    for (size_t l = 0; l < QSF_LANES; l++) {
        uint32_t bits;
        memcpy(&bits, &shifted.at[l], sizeof bits);
        const int32_t n = (int32_t)(bits - 0x4B400000U);
        const int32_t half = n >> 1;
        const uint32_t factor_bits[2] = {(uint32_t)(half + 127) << 23, (uint32_t)(n - half + 127)
                                                                           << 23};
        float factor[2];
        memcpy(factor, factor_bits, sizeof factor);
        v.at[l] = v.at[l] * factor[0] * factor[1];
    }
    return v;
}

/* The sum in the order of kernels.h: l += l + 8, then 4, 2, 1. */
static inline float lanes_sum(lanes v)
{
    for (size_t width = 8; width > 0; width /= 2)
        for (size_t l = 0; l < width; l++)
            v.at[l] = v.at[l] + v.at[l + width];
    return v.at[0];
}

/* lanes_max of lanes l and l + 8, then 4, 2, 1. */
static inline float lanes_top(lanes v)
{
    for (size_t width = 8; width > 0; width /= 2)
        for (size_t l = 0; l < width; l++)
            v.at[l] = v.at[l] > v.at[l + width] ? v.at[l] : v.at[l + width];
    return v.at[0];
}

/* The larger of two magnitudes, which are not negative; NaN counts as above infinity. */
static inline lanes lanes_larger_magnitude(lanes a, lanes b)
{
    for (size_t l = 0; l < QSF_LANES; l++) {
        int32_t bits_a;
        int32_t bits_b;
        memcpy(&bits_a, &a.at[l], sizeof bits_a);
        memcpy(&bits_b, &b.at[l], sizeof bits_b);
        a.at[l] = bits_a > bits_b ? a.at[l] : b.at[l];
    }
    return a;
}

/* The largest magnitude of all lanes, as lanes_larger_magnitude. */
static inline float lanes_top_magnitude(lanes v)
{
    float top = v.at[0];
    for (size_t l = 1; l < QSF_LANES; l++)
        top = top > v.at[l] || top != top ? top : v.at[l];
    return top;
}

/* Rounds to nearest even and splits into 256 * q + q_low, [16] each, q_low in -128..127. Adds
 * them to the lanes of *sum and *sum_low. Every lane is in -32512..32512. */
static inline void lanes_store_i8_pair(int8_t *q, int8_t *q_low, lanes v, lanes *sum,
                                       lanes *sum_low)
{
    for (size_t l = 0; l < QSF_LANES; l++) {
        const int32_t fine = (int32_t)rintf(v.at[l]);
        const int32_t high = (fine + 128 + 65536) / 256 - 256; /* the quotient rounded down */
        q[l] = (int8_t)high;
        q_low[l] = (int8_t)(fine - 256 * high);
        sum->at[l] += (float)q[l];
        sum_low->at[l] += (float)q_low[l];
    }
}

/* Rounds x [64] * factor as lanes_store_i8_pair, to q and q_low [64]. Adds 256 * q + q_low to the
 * lanes of *sum, in any order. */
static inline void lanes_store_fine(int8_t *q, int8_t *q_low, const float *x, lanes factor,
                                    lanes *sum)
{
    for (size_t i = 0; i < QSF_BLOCK; i++) {
        const int32_t fine = (int32_t)rintf(x[i] * factor.at[0]);
        const int32_t high = (fine + 128 + 65536) / 256 - 256; /* the quotient rounded down */
        q[i] = (int8_t)high;
        q_low[i] = (int8_t)(fine - 256 * high);
        sum->at[i % QSF_LANES] += (float)fine;
    }
}

/* Loads bits shift .. shift + 7 under `mask` of 16 little-endian 32-bit words. */
static inline lanes lanes_load_codes(const unsigned char *p, unsigned shift, uint32_t mask)
{
    lanes v;
    for (size_t l = 0; l < QSF_LANES; l++)
        v.at[l] = (float)(qsf_load_u32(p + 4 * l) >> shift & mask);
    return v;
}

/* Of the codes of `bits` bits in 16 bytes of each of four rows, low bits first: code k of byte i of
 * row j becomes byte 4 i + j of to + k * step, plus 128 if it has fewer than 8 bits. */
static inline void lanes_spread_codes(const unsigned char *from, size_t stride, size_t bits,
                                      unsigned char *to, size_t step)
{
    for (size_t k = 0; k < 8 / bits; k++)
        for (size_t i = 0; i < 16; i++)
            for (size_t j = 0; j < 4; j++) {
                const unsigned code = from[j * stride + i] >> (k * bits) & ((1U << bits) - 1);
                to[k * step + 4 * i + j] = (unsigned char)(code + (bits == 8 ? 0 : 128));
            }
}

/* Of the codes of `bits` bits in bytes [4, 16, 4], low bits first: code k of byte [i, r, c] becomes
 * byte [r / 4, 4 i + c, r % 4] of [4, 16, 4] at to + k * step, plus 128 if it has fewer than 8
 * bits. */
static inline void lanes_turn_codes(const unsigned char *from, size_t bits, unsigned char *to,
                                    size_t step)
{
    for (size_t k = 0; k < 8 / bits; k++)
        for (size_t r = 0; r < 16; r++)
            for (size_t d = 0; d < 16; d++) {
                const unsigned byte = from[d / 4 * 64 + r * 4 + d % 4];
                const unsigned code = byte >> (k * bits) & ((1U << bits) - 1);
                to[k * step + r / 4 * 64 + d * 4 + r % 4] =
                    (unsigned char)(code + (bits == 8 ? 0 : 128));
            }
}

/* Lanes l and l + h, for l & h == 0, become their sum and difference; h is 1, 2, 4 or 8. */
static inline lanes lanes_butterfly(lanes v, size_t h)
{
    lanes out;
    for (size_t l = 0; l < QSF_LANES; l++)
        out.at[l] = (l & h) == 0 ? v.at[l] + v.at[l + h] : v.at[l - h] - v.at[l];
    return out;
}
