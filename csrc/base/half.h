/* half.h - IEEE 754 binary16 to and from binary32, in integer arithmetic.
 *
 * The reference for the hardware conversions. To binary32: exact. To binary16: rounds to nearest,
 * ties to even. NaN stays NaN.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>
#include <string.h>

static inline float qsf_half_to_float(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    const uint32_t exponent = (uint32_t)(h >> 10) & 0x1F;
    uint32_t mantissa = h & 0x3FF;
    uint32_t bits;
    if (exponent == 0x1F) {
        /* A NaN becomes quiet, as in hardware. */
        bits = sign | 0x7F800000 | mantissa << 13 | (mantissa != 0 ? 0x400000U : 0U);
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else if (mantissa == 0) {
        bits = sign;
    } else {
        uint32_t e = 113;
        while ((mantissa & 0x400) == 0) {
            mantissa <<= 1;
            e--;
        }
        bits = sign | e << 23 | (mantissa & 0x3FF) << 13;
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t qsf_half_from_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) /* NaN: quiet, keeps the top bits of its payload */
        return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    if (magnitude >= 0x477FF000) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7C00);
    uint32_t dropped_bits = 13;
    uint32_t kept;                 /* biased exponent and mantissa before rounding */
    if (magnitude >= 0x38800000) { /* 2^-14: normal in binary16 */
        kept = magnitude - 0x38000000;
    } else if (magnitude >= 0x33000000) { /* 2^-25: may round to a subnormal */
        dropped_bits = 126 - (magnitude >> 23);
        kept = (magnitude & 0x7FFFFF) | 0x800000;
    } else {
        return sign;
    }
    const uint32_t result = kept >> dropped_bits;
    const uint32_t rest = kept & ((1U << dropped_bits) - 1);
    const uint32_t half_way = 1U << (dropped_bits - 1);
    const uint32_t up = rest > half_way || (rest == half_way && (result & 1) != 0);
    return (uint16_t)(sign | (result + up));
}

/* The scale of an MXFP4 block, times 1/2, because its codes stand for multiples of 1/2: 2^(e -
 * 128), exact for every e. */
static inline float qsf_half_scale_from_e8m0(uint8_t e)
{
    const uint32_t bits = e < 2 ? UINT32_C(0x00200000) << e : (uint32_t)(e - 1) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}
