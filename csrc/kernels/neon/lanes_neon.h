/* lanes_neon.h - the operations of lanes_scalar.h on four 128-bit registers.
 *
 * Included after <arm_neon.h>. Every 64-bit ARM has these instructions, including the conversions
 * of halves. lanes_max is a comparison and a selection, because the instruction for the maximum
 * returns NaN if either operand is NaN.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#define QSF_LANES 16

typedef struct lanes {
    float32x4_t a; /* lanes 0..3 */
    float32x4_t b;
    float32x4_t c;
    float32x4_t d; /* lanes 12..15 */
} lanes;

static inline lanes lanes_of(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d)
{
    return (lanes){a, b, c, d};
}

/* The same for one operand. */
#define LANES_OF_1(op, x) lanes_of(op((x).a), op((x).b), op((x).c), op((x).d))
/* An operation on all registers alike, of two operands */
#define LANES_OF_2(name, op)                                                     \
    static inline lanes name(lanes x, lanes y)                                   \
    {                                                                            \
        return lanes_of(op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)); \
    }

static inline lanes lanes_set(float value)
{
    const float32x4_t v = vdupq_n_f32(value);
    return (lanes){v, v, v, v};
}

static inline lanes lanes_load(const float *p)
{
    return (lanes){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}

static inline void lanes_store(float *p, lanes v)
{
    vst1q_f32(p, v.a);
    vst1q_f32(p + 4, v.b);
    vst1q_f32(p + 8, v.c);
    vst1q_f32(p + 12, v.d);
}

/* NEON cannot mask an access, so the end of a vector is copied through the stack. */
static inline lanes lanes_load_part(const float *p, size_t n)
{
    if (n == QSF_LANES)
        return lanes_load(p);
    float buffer[QSF_LANES] = {0};
    memcpy(buffer, p, n * sizeof *p);
    return lanes_load(buffer);
}

static inline void lanes_store_part(float *p, lanes v, size_t n)
{
    if (n == QSF_LANES) {
        lanes_store(p, v);
        return;
    }
    float buffer[QSF_LANES];
    lanes_store(buffer, v);
    memcpy(p, buffer, n * sizeof *p);
}

static inline lanes lanes_load_f16(const unsigned char *p)
{
    const float16x8_t lo = vreinterpretq_f16_u8(vld1q_u8(p));
    const float16x8_t hi = vreinterpretq_f16_u8(vld1q_u8(p + 16));
    return (lanes){vcvt_f32_f16(vget_low_f16(lo)), vcvt_high_f32_f16(lo),
                   vcvt_f32_f16(vget_low_f16(hi)), vcvt_high_f32_f16(hi)};
}

static inline lanes lanes_load_u8(const unsigned char *p)
{
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t lo = vmovl_u8(vget_low_u8(bytes));
    const uint16x8_t hi = vmovl_high_u8(bytes);
    return (lanes){vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_high_u16(lo)),
                   vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_high_u16(hi))};
}

static inline void lanes_store_f16(unsigned char *p, lanes v)
{
    const float16x8_t lo = vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b);
    const float16x8_t hi = vcvt_high_f16_f32(vcvt_f16_f32(v.c), v.d);
    vst1q_u8(p, vreinterpretq_u8_f16(lo));
    vst1q_u8(p + 16, vreinterpretq_u8_f16(hi));
}

LANES_OF_2(lanes_add, vaddq_f32)
LANES_OF_2(lanes_sub, vsubq_f32)
LANES_OF_2(lanes_mul, vmulq_f32)
LANES_OF_2(lanes_div, vdivq_f32)

static inline lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return lanes_of(vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b), vfmaq_f32(c.c, a.c, b.c),
                    vfmaq_f32(c.d, a.d, b.d));
}

static inline float32x4_t max4(float32x4_t a, float32x4_t b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

static inline float32x4_t min4(float32x4_t a, float32x4_t b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}

LANES_OF_2(lanes_max, max4)
LANES_OF_2(lanes_min, min4)

static inline lanes lanes_abs(lanes a)
{
    return LANES_OF_1(vabsq_f32, a);
}

static inline lanes lanes_where_less(lanes a, lanes b, lanes yes, lanes no)
{
    return (lanes){
        vbslq_f32(vcltq_f32(a.a, b.a), yes.a, no.a), vbslq_f32(vcltq_f32(a.b, b.b), yes.b, no.b),
        vbslq_f32(vcltq_f32(a.c, b.c), yes.c, no.c), vbslq_f32(vcltq_f32(a.d, b.d), yes.d, no.d)};
}

static inline float32x4_t between4(size_t begin, size_t end, uint32_t offset, float32x4_t in,
                                   float32x4_t out)
{
    static const uint32_t first[4] = {0, 1, 2, 3};
    const uint32x4_t idx = vaddq_u32(vld1q_u32(first), vdupq_n_u32(offset));
    const uint32x4_t chosen = vandq_u32(vcgeq_u32(idx, vdupq_n_u32((uint32_t)begin)),
                                        vcltq_u32(idx, vdupq_n_u32((uint32_t)end)));
    return vbslq_f32(chosen, in, out);
}

static inline lanes lanes_between(size_t begin, size_t end, lanes in, lanes out)
{
    return (lanes){between4(begin, end, 0, in.a, out.a), between4(begin, end, 4, in.b, out.b),
                   between4(begin, end, 8, in.c, out.c), between4(begin, end, 12, in.d, out.d)};
}

static inline float32x4_t times_pow2_4(float32x4_t v, float32x4_t shifted)
{
    const int32x4_t n = vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4B400000));
    const int32x4_t half = vshrq_n_s32(n, 1);
    const int32x4_t bias = vdupq_n_s32(127);
    const int32x4_t factor0 = vshlq_n_s32(vaddq_s32(half, bias), 23);
    const int32x4_t factor1 = vshlq_n_s32(vaddq_s32(vsubq_s32(n, half), bias), 23);
    return vmulq_f32(vmulq_f32(v, vreinterpretq_f32_s32(factor0)), vreinterpretq_f32_s32(factor1));
}

LANES_OF_2(lanes_times_pow2, times_pow2_4)

static inline float lanes_sum(lanes v)
{
    const float32x4_t by4 = vaddq_f32(vaddq_f32(v.a, v.c), vaddq_f32(v.b, v.d));
    const float32x2_t by2 = vadd_f32(vget_low_f32(by4), vget_high_f32(by4));
    return vget_lane_f32(by2, 0) + vget_lane_f32(by2, 1);
}

static inline float lanes_top(lanes v)
{
    const float32x4_t by4 = max4(max4(v.a, v.c), max4(v.b, v.d));
    const float32x4_t by2 = max4(by4, vextq_f32(by4, by4, 2));
    return vgetq_lane_f32(max4(by2, vextq_f32(by2, by2, 1)), 0);
}

static inline float32x4_t larger_magnitude4(float32x4_t a, float32x4_t b)
{
    return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b)));
}

LANES_OF_2(lanes_larger_magnitude, larger_magnitude4)

static inline float lanes_top_magnitude(lanes v)
{
    const float32x4_t by4 =
        larger_magnitude4(larger_magnitude4(v.a, v.b), larger_magnitude4(v.c, v.d));
    const int32_t top = vmaxvq_s32(vreinterpretq_s32_f32(by4));
    return vget_lane_f32(vreinterpret_f32_s32(vdup_n_s32(top)), 0);
}

/* Writes four registers of 4 small integers as 16 bytes and adds them to *sum. */
static inline void store_i8x16(int8_t *to, int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d,
                               lanes *sum)
{
    const int16x8_t lo = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
    const int16x8_t hi = vcombine_s16(vmovn_s32(c), vmovn_s32(d));
    vst1q_s8(to, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
    *sum = lanes_add(
        *sum, (lanes){vcvtq_f32_s32(a), vcvtq_f32_s32(b), vcvtq_f32_s32(c), vcvtq_f32_s32(d)});
}

static inline int32x4_t low_part4(int32x4_t fine, int32x4_t high)
{
    return vsubq_s32(fine, vshlq_n_s32(high, 8));
}

static inline void lanes_store_i8_pair(int8_t *q, int8_t *q_low, lanes v, lanes *sum,
                                       lanes *sum_low)
{
    const int32x4_t fine[4] = {vcvtnq_s32_f32(v.a), vcvtnq_s32_f32(v.b), vcvtnq_s32_f32(v.c),
                               vcvtnq_s32_f32(v.d)};
    /* A rounding shift computes q: fine / 256 to nearest, halves up. */
    const int32x4_t high[4] = {vrshrq_n_s32(fine[0], 8), vrshrq_n_s32(fine[1], 8),
                               vrshrq_n_s32(fine[2], 8), vrshrq_n_s32(fine[3], 8)};
    store_i8x16(q, high[0], high[1], high[2], high[3], sum);
    store_i8x16(q_low, low_part4(fine[0], high[0]), low_part4(fine[1], high[1]),
                low_part4(fine[2], high[2]), low_part4(fine[3], high[3]), sum_low);
}

/* As lanes_store_fine, of x [16]; returns sums of four. */
static inline int32x4_t store_fine16(int8_t *q, int8_t *q_low, const float *x, float32x4_t factor)
{
    int32x4_t fine[4];
    for (size_t i = 0; i < 4; i++)
        fine[i] = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x + 4 * i), factor));
    const int16x8_t first = vcombine_s16(vmovn_s32(fine[0]), vmovn_s32(fine[1]));
    const int16x8_t last = vcombine_s16(vmovn_s32(fine[2]), vmovn_s32(fine[3]));
    vst1q_s8(q, vcombine_s8(vrshrn_n_s16(first, 8), vrshrn_n_s16(last, 8)));
    vst1q_s8(q_low, vcombine_s8(vmovn_s16(first), vmovn_s16(last)));
    return vaddq_s32(vaddq_s32(fine[0], fine[1]), vaddq_s32(fine[2], fine[3]));
}

static inline void lanes_store_fine(int8_t *q, int8_t *q_low, const float *x, lanes factor,
                                    lanes *sum)
{
    const lanes sums = {vcvtq_f32_s32(store_fine16(q, q_low, x, factor.a)),
                        vcvtq_f32_s32(store_fine16(q + 16, q_low + 16, x + 16, factor.a)),
                        vcvtq_f32_s32(store_fine16(q + 32, q_low + 32, x + 32, factor.a)),
                        vcvtq_f32_s32(store_fine16(q + 48, q_low + 48, x + 48, factor.a))};
    *sum = lanes_add(*sum, sums);
}

static inline float32x4_t load_codes4(const unsigned char *p, unsigned shift, uint32_t mask)
{
    const uint32x4_t words = vreinterpretq_u32_u8(vld1q_u8(p));
    const uint32x4_t shifted = vshlq_u32(words, vdupq_n_s32(-(int32_t)shift));
    return vcvtq_f32_u32(vandq_u32(shifted, vdupq_n_u32(mask)));
}

static inline lanes lanes_load_codes(const unsigned char *p, unsigned shift, uint32_t mask)
{
    return (lanes){load_codes4(p, shift, mask), load_codes4(p + 16, shift, mask),
                   load_codes4(p + 32, shift, mask), load_codes4(p + 48, shift, mask)};
}

/* Returns code k of each byte, plus 128 if it has fewer than 8 bits. */
static inline uint8x16_t codes_of(uint8x16_t bytes, size_t bits, size_t k)
{
    const uint8x16_t shifted = vshlq_u8(bytes, vdupq_n_s8((int8_t)(0 - (int)(k * bits))));
    return vorrq_u8(vandq_u8(shifted, vdupq_n_u8((uint8_t)((1U << bits) - 1))),
                    vdupq_n_u8(bits == 8 ? 0 : 128));
}

static inline void lanes_spread_codes(const unsigned char *from, size_t stride, size_t bits,
                                      unsigned char *to, size_t step)
{
    for (size_t k = 0; k < 8 / bits; k++) {
        uint8x16x4_t codes;
        for (size_t j = 0; j < 4; j++)
            codes.val[j] = codes_of(vld1q_u8(from + j * stride), bits, k);
        vst4q_u8(to + k * step, codes);
    }
}

static inline void lanes_turn_codes(const unsigned char *from, size_t bits, unsigned char *to,
                                    size_t step)
{
    static const uint8_t by_byte[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    for (size_t i = 0; i < 16; i++) {
        const uint8x16_t four =
            vqtbl1q_u8(vld1q_u8(from + i % 4 * 64 + i / 4 * 16), vld1q_u8(by_byte));
        for (size_t k = 0; k < 8 / bits; k++)
            vst1q_u8(to + k * step + 16 * i, codes_of(four, bits, k));
    }
}

static inline float32x4_t butterfly2(float32x4_t v)
{
    const float32x4_t swapped = vextq_f32(v, v, 2);
    return vcombine_f32(vget_low_f32(vaddq_f32(v, swapped)), vget_low_f32(vsubq_f32(v, swapped)));
}

static inline float32x4_t butterfly1(float32x4_t v)
{
    const float32x4_t swapped = vrev64q_f32(v);
    return vtrn1q_f32(vaddq_f32(v, swapped), vsubq_f32(v, swapped));
}

static inline lanes lanes_butterfly(lanes v, size_t h)
{
    if (h == 8)
        return (lanes){vaddq_f32(v.a, v.c), vaddq_f32(v.b, v.d), vsubq_f32(v.a, v.c),
                       vsubq_f32(v.b, v.d)};
    if (h == 4)
        return (lanes){vaddq_f32(v.a, v.b), vsubq_f32(v.a, v.b), vaddq_f32(v.c, v.d),
                       vsubq_f32(v.c, v.d)};
    return h == 2 ? LANES_OF_1(butterfly2, v) : LANES_OF_1(butterfly1, v);
}
