/* table.h - one row for each type of weights, with all properties that the library uses.
 *
 * Formats of tiles: docs/format.md, section 5. Python has ids, names and bytes from here: the build
 * reads the rows by their form (qsf/native/build_ffi.py).
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* clang-format off */

/* Columns: id in files; name of the constant; name in functions; name that people use; bytes of a
 * tile; arrangement of the codes (qsf_codes); form of the scales (qsf_scales); columns that share a
 * scale; 1 if they share a min, too; factor, zero and unit. A type without a min has the weight
 *   (factor * code - zero) * unit * scale
 * Codes of E2M1, LEVELS and IQ4 are replaced by (their value + zero) first. */
#define QSF_CODED_TYPES(X)                                                                   \
    X( 0, 2BIT_SYM,      2bit_sym,      "2bit-sym",       288, 2BIT,  F16,  64, 0,   3, 2, 0.5F) \
    X( 1, 2BIT,          2bit,          "2bit",           320, 2BIT,  F16,  64, 1,   0, 1, 1.0F) \
    X( 2, 3BIT,          3bit,          "3bit",           448, 3BIT,  F16,  64, 1,   0, 1, 1.0F) \
    X( 3, 4BIT,          4bit,          "4bit",           576, 4BIT,  F16,  64, 1,   0, 1, 1.0F) \
    X( 4, TERNARY,       ternary,       "ternary",        288, 2BIT,  F16,  64, 0,   1, 1, 1.0F) \
    X( 6, 8BIT,          8bit,          "8bit",          1056, 8BIT,  F16,  64, 0, 128, 1, 1.0F) \
    X( 9, TERNARY_DENSE, ternary_dense, "ternary-dense",  240, TRITS, F16,  64, 0,   1, 1, 1.0F) \
    X(10, 4BIT_SYM,      4bit_sym,      "4bit-sym",       544, 4BIT,  F16,  64, 0,   8, 1, 1.0F) \
    X(11, MXFP4,         mxfp4,         "mxfp4",          544, E2M1,  E8M0, 32, 0,  12, 1, 1.0F) \
    X(12, Q4_0,          q4_0,          "q4_0",           576, 4BIT,  F16,  32, 0,   8, 1, 1.0F) \
    X(13, Q4_1,          q4_1,          "q4_1",           640, 4BIT,  F16,  32, 1,   0, 1, 1.0F) \
    X(14, Q5_0,          q5_0,          "q5_0",           704, 5BIT,  F16,  32, 0,  16, 1, 1.0F) \
    X(15, Q5_1,          q5_1,          "q5_1",           768, 5BIT,  F16,  32, 1,   0, 1, 1.0F) \
    X(16, Q8_0,          q8_0,          "q8_0",          1088, 8BIT,  F16,  32, 0, 128, 1, 1.0F) \
    X(17, Q4_K,          q4_k,          "q4_k",           576, 4BIT,  6BIT, 32, 1,   0, 1, 1.0F) \
    X(18, Q5_K,          q5_k,          "q5_k",           704, 5BIT,  6BIT, 32, 1,   0, 1, 1.0F) \
    X(19, Q6_K,          q6_k,          "q6_k",           840, 6BIT,  8BIT, 16, 0,  32, 1, 1.0F) \
    X(20, 4BIT_NL,       4bit_nl,       "4bit-nl",        544, LEVELS, F16, 64, 0,  32, 1, 1.0F) \
    X(21, Q2_K,          q2_k,          "q2_k",           336, 2BIT,  4BIT, 16, 1,   0, 1, 1.0F) \
    X(22, Q3_K,          q3_k,          "q3_k",           456, 3BIT,  8BIT, 16, 0,   4, 1, 1.0F) \
    X(23, IQ4_NL,        iq4_nl,        "iq4_nl",         576, IQ4,   F16,  32, 0, 128, 1, 1.0F) \
    X(24, IQ4_XS,        iq4_xs,        "iq4_xs",         552, IQ4,   8BIT, 32, 0, 128, 1, 1.0F)

/* By code, the level that a code of LEVELS stands for, plus 32. The levels are integers of 6 bits,
 * one of them 0, with the least squared error of real weights (bench/LOG-quantisation.md).
 * A 16-bit sum holds four products of them. */
#define QSF_LEVELS 0, 7, 13, 17, 21, 24, 27, 30, 32, 35, 38, 41, 44, 48, 53, 60

/* By code, the levels of llama.cpp's IQ4_NL and IQ4_XS, plus 128 */
#define QSF_IQ4_LEVELS \
    1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241

/* By code, the values of E2M1 in halves, plus 12 */
#define QSF_E2M1_LEVELS 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

/* Without codes. Columns: the first five of above */
#define QSF_FLOAT_TYPES(X)        \
    X( 7, F16, f16, "f16", 2048)  \
    X( 8, F32, f32, "f32", 4096)

/* clang-format on */
