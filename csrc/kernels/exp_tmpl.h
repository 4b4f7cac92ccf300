/* exp_tmpl.h - the one exponential function of the engine, and tanh, over lanes (lanes_*.h). */
/* SPDX-License-Identifier: Apache-2.0 */

/* e^x with an error of at most 2 ulp if the result is normal; a subnormal result is rounded once
 * more. 0 below -104, infinity above 88.73, NaN for NaN.
 *
 * x = n ln2 + r, |r| <= ln2 / 2; e^r = 1 + r + r^2 Q(r), where Q is the minimax polynomial of
 * degree 4, with an error of at most 0.07 * 2^-24. Adding 1.5 * 2^23 rounds x / ln2 to the integer
 * n, in the low bits of the sum. */
static inline lanes lanes_exp(lanes x)
{
    /* The bound is the first operand, so that NaN stays NaN. */
    const lanes inside = lanes_min(lanes_set(90.0F), lanes_max(lanes_set(-105.0F), x));
    const lanes shifter = lanes_set(0x1.8p23F);
    const lanes shifted = lanes_fma(inside, lanes_set(0x1.715476p0F), shifter);
    const lanes n = lanes_sub(shifted, shifter);
    /* ln2 in two parts: the first ends in zeros, so that n times it is exact. */
    const lanes r0 = lanes_fma(n, lanes_set(-0x1.62e4p-1F), inside);
    const lanes r = lanes_fma(n, lanes_set(-0x1.7f7d1cp-20F), r0);
    lanes q = lanes_set(0x1.6a241ap-10F);
    q = lanes_fma(q, r, lanes_set(0x1.1239f2p-7F));
    q = lanes_fma(q, r, lanes_set(0x1.5558f2p-5F));
    q = lanes_fma(q, r, lanes_set(0x1.555492p-3F));
    q = lanes_fma(q, r, lanes_set(0x1.fffffcp-2F));
    const lanes above_one = lanes_fma(q, lanes_mul(r, r), r);
    return lanes_times_pow2(lanes_add(lanes_set(1.0F), above_one), shifted);
}

/* tanh x with an error of at most 3 ulp, NaN for NaN. For |x| < 0.625 it is x + x z P(z), z = x^2,
 * where P is the minimax polynomial of degree 4, with an error of at most 0.08 * 2^-24; else
 * 1 - 2 / (e^2|x| + 1) with the sign of x, which would lose digits near 0. */
static inline lanes lanes_tanh(lanes x)
{
    const lanes ones = lanes_set(1.0F);
    const lanes z = lanes_mul(x, x);
    lanes p = lanes_set(-0x1.75e1cep-8F);
    p = lanes_fma(p, z, lanes_set(0x1.52269cp-6F));
    p = lanes_fma(p, z, lanes_set(-0x1.b83c5ap-5F));
    p = lanes_fma(p, z, lanes_set(0x1.110726p-3F));
    p = lanes_fma(p, z, lanes_set(-0x1.555532p-2F));
    const lanes near = lanes_fma(lanes_mul(x, z), p, x);
    const lanes magnitude = lanes_abs(x);
    const lanes e = lanes_exp(lanes_add(magnitude, magnitude));
    const lanes far = lanes_sub(ones, lanes_div(lanes_set(2.0F), lanes_add(e, ones)));
    const lanes minus_far = lanes_mul(far, lanes_set(-1.0F));
    const lanes signed_far = lanes_where_less(x, lanes_set(0.0F), minus_far, far);
    return lanes_where_less(magnitude, lanes_set(0.625F), near, signed_far);
}
