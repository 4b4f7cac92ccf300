/* exp.c - the exponential function and tanh against the C library's in double. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "base/bytes.h"
#include "base/half.h"
#include "kernel_data.h"

#include "kernels/scalar/lanes_scalar.h"

#include "kernels/exp_tmpl.h"

static float exp_of(float x)
{
    return lanes_exp(lanes_set(x)).at[3];
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The distance of two floats of x's binade. */
static double ulp_of(double x)
{
    int exponent;
    frexp(x, &exponent);
    return ldexp(1.0, exponent - 24);
}

/* With u = 2^-24, half the distance of floats in [1, 2): the sum 1 + s rounds by u; s and the
 * two steps of r lie below 1/2 and round by u/4 each; r^2 and Q r^2 by less than u/8 together;
 * the polynomial is off by 0.07 u, ln2's tail by less than u/100. Together below 2 u of
 * e^r >= 0.7, whose ulp is at least u: 2 ulp. Where the result is subnormal, the scaling
 * rounds once more, by half of the spacing 2^-149. */
static void check_accuracy(void)
{
    double worst_ulp = 0.0;
    const double step = (double)check_stride() / 4099.0;
    for (double x = -103.5; x < 88.72; x += step) {
        const float xf = (float)x;
        const double want = exp((double)xf);
        const double error = fabs((double)exp_of(xf) - want);
        if (want >= 0x1p-126) {
            worst_ulp = fmax(worst_ulp, error / ulp_of(want));
        } else if (!CHECK(error <= 2.0 * ulp_of(want) + 0x1p-150)) {
            printf("  x = %a: off by %g\n", x, error);
            return;
        }
    }
    printf("exp: worst error %.3f ulp\n", worst_ulp);
    CHECK(worst_ulp > 0.4 && worst_ulp <= 2.0); /* 0.4: the sweep saw roundings at all */
}

static void check_ends(void)
{
    CHECK_EQ(bits_of(exp_of(0.0F)), bits_of(1.0F));
    CHECK_EQ(bits_of(exp_of(-0.0F)), bits_of(1.0F));
    CHECK_EQ(bits_of(exp_of(-104.0F)), 0);
    CHECK_EQ(bits_of(exp_of(-INFINITY)), 0);
    CHECK_EQ(bits_of(exp_of(-3e38F)), 0);
    CHECK_EQ(bits_of(exp_of(88.73F)), bits_of(INFINITY));
    CHECK_EQ(bits_of(exp_of(3e38F)), bits_of(INFINITY));
    CHECK_EQ(bits_of(exp_of(INFINITY)), bits_of(INFINITY));
    CHECK(isfinite(exp_of(88.72F)));
    CHECK(exp_of(-103.0F) > 0.0F);
    CHECK(isnan(exp_of(NAN)));
    CHECK(isnan(exp_of(-NAN)));
}

static float tanh_of(float x)
{
    return lanes_tanh(lanes_set(x)).at[5];
}

/* With u as above, below 0.625: the polynomial is off by 0.08 u of tanh x; x^2, x z and the fma
 * that rounds P move x z P < 0.12 by 2 u of it, the last fma rounds by at most 2 u of the result:
 * below 3 u, 1.5 ulp. Above: e is off by 2 ulp <= 4 u, which 2 / (e + 1) < 0.45 passes on times
 * e / (e + 1); the sum and the quotient round by 2 u of it more: below 2.7 u, the difference u, of
 * at least 0.55 with an ulp of u. */
static void check_tanh(void)
{
    double worst_ulp = 0.0;
    const double step = (double)check_stride() / 4099.0;
    for (double x = -12.0; x < 12.0; x += step) {
        const float xf = (float)(x * x * x / 144.0); /* denser near 0 */
        const double want = tanh((double)xf);
        const double error = fabs((double)tanh_of(xf) - want);
        worst_ulp = fmax(worst_ulp, error / ulp_of(want));
        CHECK(tanh_of(-xf) == -tanh_of(xf));
    }
    printf("tanh: worst error %.3f ulp\n", worst_ulp);
    CHECK(worst_ulp > 0.4 && worst_ulp <= 4.0);
    CHECK_EQ(bits_of(tanh_of(0.0F)), bits_of(0.0F));
    CHECK_EQ(bits_of(tanh_of(-0.0F)), bits_of(0.0F)); /* the sum of +0 and -0 */
    CHECK_EQ(bits_of(tanh_of(0x1p-140F)), bits_of(0x1p-140F));
    CHECK_EQ(bits_of(tanh_of(30.0F)), bits_of(1.0F));
    CHECK_EQ(bits_of(tanh_of(3e38F)), bits_of(1.0F));
    CHECK_EQ(bits_of(tanh_of(-INFINITY)), bits_of(-1.0F));
    CHECK(isnan(tanh_of(NAN)));
    CHECK(isnan(tanh_of(-NAN)));
}

int check_exp(void)
{
    check_accuracy();
    check_ends();
    check_tanh();
    return check_report("exp");
}
