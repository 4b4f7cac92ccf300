/* tile_weights.h - the weights of tiles of every type, read as docs/format.md describes them. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_TILE_WEIGHTS_H
#define QSF_TESTS_TILE_WEIGHTS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/half.h"
#include "types/dtype.h"

/* The weight of row r, column c, with its two parts, read as section 5 of the format says:
 * the value is code * scale + min, code already without its zero point. */
typedef struct weight {
    double code;
    double scale;
    double min;
} weight;

static double half_at(const unsigned char *tile, size_t idx)
{
    return (double)qsf_half_to_float((uint16_t)(tile[2 * idx] | tile[2 * idx + 1] << 8));
}

static weight with_min(const unsigned char *tile, size_t r, double code)
{
    return (weight){code, half_at(tile, r), half_at(tile, 16 + r)};
}

static weight without_min(const unsigned char *tile, size_t r, double code)
{
    return (weight){code, half_at(tile, r), 0.0};
}

/* 4^b: what a byte is divided by to bring its b-th pair of bits to the end */
static unsigned two_bits(size_t b)
{
    return 1U << 2 * b;
}

/* byte / 256 as a fraction in base 3: digit k after the point. Multiplying by 3 brings the
 * next digit before the point, where it is cut off. */
static unsigned trit_of(unsigned byte, size_t k)
{
    unsigned digit = 0;
    for (size_t i = 0; i <= k; i++) {
        digit = byte * 3 / 256;
        byte = byte * 3 % 256;
    }
    return digit;
}

/* Codes of 4 bits at `codes`, and the higher bits behind them. */
static unsigned nibble_at(const unsigned char *codes, size_t r, size_t c)
{
    return codes[c / 4 % 8 * 64 + r * 4 + c % 4] / (c < 32 ? 1U : 16U) % 16U;
}

static unsigned fifth_at(const unsigned char *codes, size_t r, size_t c)
{
    return (unsigned)codes[512 + c / 4 % 2 * 64 + r * 4 + c % 4] >> c / 8 & 1U;
}

static unsigned fifth_and_sixth_at(const unsigned char *codes, size_t r, size_t c)
{
    return codes[512 + c / 4 % 4 * 64 + r * 4 + c % 4] / two_bits(c / 16) % 4U;
}

/* 6-bit integer `i` of 0 .. 7 of the scales (or of the mins) of row r, in 192 bytes */
static unsigned six_bits(const unsigned char *bytes, bool of_min, size_t i, size_t r)
{
    const unsigned whole = bytes[(of_min ? 64 : 0) + i % 4 * 16 + r];
    const unsigned both = bytes[128 + i % 4 * 16 + r];
    return i < 4 ? whole % 64 : (of_min ? both / 16 : both % 16) + whole / 64 * 16;
}

/* Of types that GGUF has, whose scales are of 32 or 16 columns. c: in the head's columns */
static weight part_weight_at(const unsigned char *head, qsf_dtype dtype, size_t r, size_t c)
{
    const unsigned char *const k4 = head + 256 + c / 64 * 512; /* codes of Q4_K */
    const unsigned char *const k5 = head + 256 + c / 64 * 640;
    const unsigned char *const k6 = head + 288 + c / 64 * 768;
    const size_t i = c / 32 % 2;
    const double scale = half_at(head, 16 * i + r);
    const double min = half_at(head, 32 + 16 * i + r);
    if (dtype == QSF_DTYPE_Q4_0)
        return (weight){nibble_at(head + 64, r, c) - 8.0, scale, 0.0};
    if (dtype == QSF_DTYPE_Q4_1)
        return (weight){nibble_at(head + 128, r, c), scale, min};
    if (dtype == QSF_DTYPE_Q5_0)
        return (weight){nibble_at(head + 64, r, c) + 16.0 * fifth_at(head + 64, r, c) - 16.0, scale,
                        0.0};
    if (dtype == QSF_DTYPE_Q5_1)
        return (weight){nibble_at(head + 128, r, c) + 16.0 * fifth_at(head + 128, r, c), scale,
                        min};
    if (dtype == QSF_DTYPE_Q8_0)
        return (weight){head[64 + c / 4 * 64 + r * 4 + c % 4] - 128.0, scale, 0.0};
    if (dtype == QSF_DTYPE_Q6_K)
        return (weight){nibble_at(k6, r, c % 64) + 16.0 * fifth_and_sixth_at(k6, r, c % 64) - 32.0,
                        half_at(head, r) * (head[32 + c / 16 * 16 + r] - 128.0), 0.0};
    const double code = dtype == QSF_DTYPE_Q4_K
                            ? nibble_at(k4, r, c % 64)
                            : nibble_at(k5, r, c % 64) + 16.0 * fifth_at(k5, r, c % 64);
    return (weight){code, half_at(head, r) * six_bits(head + 64, false, c / 32, r),
                    -half_at(head, 16 + r) * six_bits(head + 64, true, c / 32, r)};
}

/* head: the tile, or the tiles that have their scales in common; c: in their columns */
static weight weight_at(const unsigned char *tile, qsf_dtype dtype, size_t r, size_t c)
{
    const size_t g = c / 4; /* group of columns */
    const size_t at = r * 4 + c % 4;
    switch (dtype) {
    case QSF_DTYPE_2BIT_SYM:
        return without_min(tile, r, tile[32 + g % 4 * 64 + at] / two_bits(g / 4) % 4 - 1.5);
    case QSF_DTYPE_2BIT:
        return with_min(tile, r, tile[64 + g % 4 * 64 + at] / two_bits(g / 4) % 4);
    case QSF_DTYPE_3BIT: {
        const unsigned low = tile[64 + g % 4 * 64 + at] / two_bits(g / 4) % 4;
        const unsigned high = tile[320 + g % 4 / 2 * 64 + at] >> (g % 2 * 4 + g / 4);
        return with_min(tile, r, low + high % 2 * 4);
    }
    case QSF_DTYPE_4BIT:
        return with_min(tile, r, tile[64 + g % 8 * 64 + at] / (g < 8 ? 1 : 16) % 16);
    case QSF_DTYPE_4BIT_SYM:
        return without_min(tile, r, tile[32 + g % 8 * 64 + at] / (g < 8 ? 1 : 16) % 16 - 8.0);
    case QSF_DTYPE_4BIT_NL: {
        static const double steps[] = {-32, -25, -19, -15, -11, -8, -5, -2,
                                       0,   3,   6,   9,   12,  16, 21, 28};
        return without_min(tile, r, steps[tile[32 + g % 8 * 64 + at] / (g < 8 ? 1 : 16) % 16]);
    }
    case QSF_DTYPE_TERNARY:
        return without_min(tile, r, tile[32 + g % 4 * 64 + at] / two_bits(g / 4) % 4 - 1.0);
    case QSF_DTYPE_TERNARY_DENSE: {
        const unsigned byte = g < 15 ? tile[32 + g / 5 * 64 + at] : tile[224 + r];
        return without_min(tile, r, trit_of(byte, g < 15 ? g % 5 : c % 4) - 1.0);
    }
    case QSF_DTYPE_MXFP4: {
        /* The table of the OCP's specification of microscaling formats, version 1.0: E2M1. */
        static const double values[] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
        const unsigned code = tile[32 + g % 8 * 64 + at] / (g < 8 ? 1 : 16) % 16;
        const double scale = ldexp(1.0, (int)tile[c / 32 * 16 + r] - 127);
        /* There is no -0. */
        return (weight){code < 8 ? values[code] : 0.0 - values[code - 8], scale, 0.0};
    }
    case QSF_DTYPE_8BIT:
        return without_min(tile, r, (double)tile[32 + g * 64 + at] - 128.0);
    case QSF_DTYPE_F16:
        return (weight){1.0, half_at(tile, c * 16 + r), 0.0};
    case QSF_DTYPE_F32: {
        float value;
        memcpy(&value, tile + 4 * (c * 16 + r), sizeof value);
        return (weight){1.0, (double)value, 0.0};
    }
    case QSF_DTYPE_MIXED:
    case QSF_DTYPE_COUNT:
        return (weight){0};
    case QSF_DTYPE_Q4_0:
    case QSF_DTYPE_Q4_1:
    case QSF_DTYPE_Q5_0:
    case QSF_DTYPE_Q5_1:
    case QSF_DTYPE_Q8_0:
    case QSF_DTYPE_Q4_K:
    case QSF_DTYPE_Q5_K:
    case QSF_DTYPE_Q6_K:
        break;
    }
    return part_weight_at(tile, dtype, r, c);
}

#endif
