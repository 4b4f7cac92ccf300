/* check_base.c - binary16, checked arithmetic, bytes, data types, the texts of failures
 * and the stopwatch. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <float.h>
#include <math.h>
#include <pthread.h>

#include "base/bytes.h"
#include "base/checked.h"
#include "base/fused.h"
#include "types/dtype.h"
#include "base/half.h"
#include "base/status.h"
#include "platform/clock.h"

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* (-1)^sign * 2^(exponent - 15) * (1 + mantissa / 1024), from the definition. */
static double half_value(uint32_t h)
{
    const int exponent = (int)(h >> 10 & 0x1F);
    const double mantissa = (double)(h & 0x3FF);
    const double magnitude =
        exponent != 0 ? ldexp(1024.0 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

static void check_half_to_float(void)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        const float have = qsf_half_to_float((uint16_t)h);
        const bool is_special = (h & 0x7C00) == 0x7C00;
        bool ok;
        if (is_special && (h & 0x3FF) != 0) /* quiet, same sign, same payload */
            ok = bits_of(have) == ((h & 0x8000) << 16 | 0x7FC00000 | (h & 0x3FF) << 13);
        else if (is_special)
            ok = bits_of(have) == ((h & 0x8000) << 16 | 0x7F800000);
        else
            ok = (double)have == half_value(h) && (signbit(have) != 0) == ((h & 0x8000) != 0);
        const uint32_t back = is_special && (h & 0x3FF) != 0 ? h | 0x200 : h;
        ok = ok && qsf_half_from_float(have) == back;
        if (!CHECK(ok) && check_is_printed())
            printf("    half 0x%04x gave 0x%08x\n", h, bits_of(have));
    }
}

/* Rounds in double, where the quotient and nearbyint's half-to-even are exact. */
static double rounded_to_half(double x)
{
    int exponent;
    (void)frexp(x, &exponent); /* |x| = m * 2^exponent, m in [0.5, 1) */
    const double step = ldexp(1.0, (exponent > -13 ? exponent : -13) - 11);
    const double rounded = nearbyint(x / step) * step;
    return fabs(rounded) > 65504.0 ? copysign((double)INFINITY, x) : rounded;
}

static void check_one_rounding(float x)
{
    const uint16_t have = qsf_half_from_float(x);
    const bool is_inf = (have & 0x7FFF) == 0x7C00;
    const double value =
        is_inf ? copysign((double)INFINITY, (have & 0x8000) != 0 ? -1.0 : 1.0) : half_value(have);
    const double want = isinf(x) ? (double)x : rounded_to_half((double)x);
    const bool is_finite = (have & 0x7C00) != 0x7C00;
    const bool ok =
        (is_finite || is_inf) && value == want && ((have & 0x8000) != 0) == (signbit(x) != 0);
    if (!CHECK(ok) && check_is_printed())
        printf("    %.9g (0x%08x) became 0x%04x\n", (double)x, bits_of(x), have);
}

/* Every middle between neighbouring halves, and the floats beside it. */
static void check_half_ties(void)
{
    for (uint32_t h = 0; h < 0x7C00; h++) {
        const double low = half_value(h);
        const double high = h + 1 < 0x7C00 ? half_value(h + 1) : 65536.0;
        const float middle = (float)((low + high) / 2.0);
        const float cases[] = {middle, nextafterf(middle, 0.0f), nextafterf(middle, INFINITY)};
        for (size_t i = 0; i < 3; i++) {
            check_one_rounding(cases[i]);
            check_one_rounding(-cases[i]);
        }
    }
}

static void check_half_extremes(void)
{
    static const float cases[] = {
        0.0f,     65504.0f,        65519.996f, 65520.0f, 65536.0f,  FLT_MAX,  INFINITY,     FLT_MIN,
        0x1p-24f, 0x1.000002p-25f, 0x1p-25f,   0x1p-26f, 0x1p-149f, 0x1p-14f, 0x1.ffcp-15f, 1.0f};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        check_one_rounding(cases[i]);
        check_one_rounding(-cases[i]);
    }
    /* A NaN whose payload lies only in the bits that are dropped stays a NaN. */
    CHECK_EQ(qsf_half_from_float(float_of(0x7F800001)), 0x7E00);
    CHECK_EQ(qsf_half_from_float(float_of(0xFF800001)), 0xFE00);
    CHECK_EQ(qsf_half_from_float(float_of(0x7FFFFFFF)), 0x7FFF);
}

static void check_arithmetic(void)
{
    static const uint64_t cases[] = {0,
                                     1,
                                     63,
                                     UINT32_MAX,
                                     (uint64_t)UINT32_MAX + 1,
                                     (uint64_t)INT64_MAX + 1,
                                     UINT64_MAX - 63,
                                     UINT64_MAX};
    for (size_t i = 0; i < COUNT_OF(cases) * COUNT_OF(cases); i++) {
        const uint64_t a = cases[i / COUNT_OF(cases)];
        const uint64_t b = cases[i % COUNT_OF(cases)];
        uint64_t want;
        uint64_t have = 77;
        const bool add_fits = !__builtin_add_overflow(a, b, &want);
        CHECK(qsf_add_u64(a, b, &have) == add_fits);
        CHECK_EQ_U64(have, add_fits ? want : 77);
        have = 77;
        const bool mul_fits = !__builtin_mul_overflow(a, b, &want);
        CHECK(qsf_mul_u64(a, b, &have) == mul_fits);
        CHECK_EQ_U64(have, mul_fits ? want : 77);
    }
    static const struct {
        uint64_t value;
        uint64_t align;
        uint64_t want; /* 77: there is none */
    } ups[] = {{0, 64, 0}, {1, 64, 64}, {64, 64, 64}, {65, 1, 65}, {UINT64_MAX - 62, 64, 77}};
    for (size_t i = 0; i < COUNT_OF(ups); i++) {
        uint64_t up = 77;
        CHECK(qsf_align_up_u64(ups[i].value, ups[i].align, &up) == (ups[i].want != 77));
        CHECK_EQ_U64(up, ups[i].want);
    }
    static const struct {
        uint64_t off;
        uint64_t n_bytes;
        bool is_inside; /* 10 bytes */
    } extents[] = {{10, 0, true},  {3, 7, true},           {3, 8, false},
                   {11, 0, false}, {UINT64_MAX, 2, false}, {5, UINT64_MAX, false}};
    for (size_t i = 0; i < COUNT_OF(extents); i++)
        CHECK(qsf_extent_inside(extents[i].off, extents[i].n_bytes, 10) == extents[i].is_inside);
    CHECK(qsf_ceil_div(0, 16) == 0 && qsf_ceil_div(16, 16) == 1 && qsf_ceil_div(17, 16) == 2);
    CHECK(qsf_round_up(17, 16) == 32 && qsf_round_up(0, 16) == 0);
}

static void check_byte_order(void)
{
    /* One byte in front, so that nothing is aligned. */
    static const unsigned char raw[] = {0, 0x01, 0x82, 0x03, 0x84, 0x05, 0x86, 0x07, 0x88};
    CHECK_EQ_U64(qsf_load_u16(raw + 1), 0x8201);
    CHECK_EQ_U64(qsf_load_u32(raw + 1), 0x84038201);
    CHECK_EQ_U64(qsf_load_u64(raw + 1), UINT64_C(0x8807860584038201));

    unsigned char out[9] = {0};
    qsf_store_u64(out + 1, UINT64_C(0x8807860584038201));
    CHECK_BYTES(out, raw, 9);
    qsf_store_u32(out + 1, 0x06050403);
    CHECK_BYTES(out + 5, raw + 5, 4);
    CHECK_EQ_U64(qsf_load_u32(out + 1), 0x06050403);
    qsf_store_u16(out + 1, 0x8201);
    CHECK_EQ_U64(qsf_load_u32(out + 1), 0x06058201);
    static const unsigned char one_half[] = {0x00, 0x00, 0x00, 0xBF};
    CHECK(qsf_load_f32(one_half) == -0.5f);
    qsf_store_f32(out + 1, -0.5f);
    CHECK_BYTES(out + 1, one_half, 4);
}

/* Names and bytes of tiles: tests/python/file/test_type_table.py. */
static void check_dtypes(void)
{
    for (uint32_t dtype = 0; dtype < QSF_DTYPE_COUNT; dtype++) {
        const size_t want = dtype == QSF_DTYPE_F16 ? 2 : dtype == QSF_DTYPE_F32 ? 4 : 0;
        CHECK_EQ(qsf_dtype_scalar_bytes(dtype), want);
        CHECK(qsf_dtype_is_quantised(dtype) == (want == 0 && dtype != QSF_DTYPE_MIXED));
    }
    CHECK_STR(qsf_dtype_name(QSF_DTYPE_COUNT), "unknown");
    CHECK_EQ(qsf_dtype_tile_bytes(UINT32_MAX) + qsf_dtype_scalar_bytes(QSF_DTYPE_COUNT), 0);
    CHECK(!qsf_dtype_is_quantised(UINT32_MAX));
    CHECK_EQ(QSF_TILE_MINS_OFF, QSF_TILE_SCALES_OFF + 2 * QSF_TILE_ROWS);
    CHECK_EQ(QSF_TILE_CODES_OFF(true), QSF_TILE_MINS_OFF + 2 * QSF_TILE_ROWS);
    CHECK_EQ(QSF_TILE_CODES_OFF(false), QSF_TILE_SCALES_OFF + 2 * QSF_TILE_ROWS);
}

static void *fail_elsewhere(void *arg)
{
    const bool fresh = strcmp(qsf_error_detail(), "no error") == 0;
    (void)qsf_fail(QSF_ERR_IO, "another thread's");
    *(bool *)arg = fresh && strcmp(qsf_error_detail(), "another thread's") == 0;
    return NULL;
}

static qsf_status forward(qsf_status status, bool *reached_end)
{
    *reached_end = false;
    QSF_TRY(status);
    *reached_end = true;
    return QSF_OK;
}

static void check_failures(void)
{
    CHECK_STR(qsf_error_detail(), "no error");
    CHECK_STATUS(QSF_FAIL(NOMEM, "%d of %s", 3, "four"), QSF_ERR_NOMEM);
    CHECK_STR(qsf_error_detail(), "3 of four");

    bool ok = false;
    pthread_t thread;
    if (CHECK_EQ(pthread_create(&thread, NULL, fail_elsewhere, &ok), 0))
        pthread_join(thread, NULL);
    CHECK(ok);
    CHECK_STR(qsf_error_detail(), "3 of four");

    char long_text[2000];
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = '\0';
    (void)QSF_FAIL(ARG, "%s", long_text);
    CHECK_EQ(strlen(qsf_error_detail()), 511);

    bool reached_end;
    CHECK_STATUS(forward(QSF_ERR_IO, &reached_end), QSF_ERR_IO);
    CHECK(!reached_end);
    CHECK_STATUS(forward(QSF_OK, &reached_end), QSF_OK);
    CHECK(reached_end);

    CHECK_STR(qsf_status_name(QSF_ERR_FORMAT), "QSF_ERR_FORMAT");
    CHECK_STR(qsf_status_name((qsf_status)-9), "unknown status");
}

/* A float whose exponent is near one of those where sums of products become subnormal, tie or
 * overflow. */
static float hostile_float(uint64_t *state)
{
    static const uint32_t exponents[] = {0, 1, 2, 23, 24, 51, 52, 64, 75, 102, 127, 150, 200, 254};
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    const uint32_t high = (uint32_t)(*state >> 32);
    const uint32_t few_bits = high % 3 == 0 ? 0x7FFFFF : high % 3 == 1 ? 0x400003 : 0x7;
    return float_of((high & 0x80000000) | exponents[(high >> 8) % 14] << 23 |
                    ((uint32_t)(*state >> 13) & few_bits));
}

/* Each pair is a sum just below or above a tie; who rounds twice sees the tie itself. */
static void check_fused(void)
{
    const float below = 0x1.fffffcp-76F;
    const float above = 0x1.000002p-75F;
    CHECK(qsf_fmaf(above, below, 0x400001p-149F) == 0x400001p-149F);
    CHECK(qsf_fmaf_in_double(above, below, 0x400001p-149F) == 0x400001p-149F);
    CHECK(qsf_fmaf_in_double(above, above, 0x400000p-149F) == 0x400001p-149F);
    CHECK(qsf_fmaf_in_double(above, -below, -0x400001p-149F) == -0x400001p-149F);
    CHECK(isinf(qsf_fmaf_in_double(FLT_MAX, FLT_MAX, -FLT_MAX)));
    CHECK(isinf(qsf_fmaf_in_double(INFINITY, -1.0F, FLT_MAX)));
    CHECK(isnan(qsf_fmaf_in_double(INFINITY, 0.0F, 1.0F)));
    CHECK(signbit(qsf_fmaf_in_double(-1.0F, 0.0F, -0.0F)) != 0);
    CHECK(qsf_fma(0x1.0000000000001p-537, 0x1.ffffffffffffep-539, 0x8000000000001p-1074) ==
          0x8000000000001p-1074);
    CHECK(qsf_fma(0x1.0000000000001p0, 0x1.ffffffffffffep-1, -1.0) == -0x1p-104);
    uint64_t state = 1;
    for (int i = 0; i < 1000000; i++) {
        const float a = hostile_float(&state);
        const float b = hostile_float(&state);
        const float c = hostile_float(&state);
        const float have = qsf_fmaf_in_double(a, b, c);
        const float want = qsf_fmaf(a, b, c);
        if (!CHECK(bits_of(have) == bits_of(want)) && check_is_printed())
            printf("    %a * %a + %a gave %a, not %a\n", (double)a, (double)b, (double)c,
                   (double)have, (double)want);
    }
}

static void check_laps(void)
{
    qsf_stopwatch w = {.last_ns = 1000};
    qsf_stopwatch_lap_at(&w, QSF_PHASE_NORM, 1300);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_NORM], 300);
    qsf_stopwatch_lap_at(&w, QSF_PHASE_QKV, 1300); /* neither of these is a lap */
    qsf_stopwatch_lap_at(&w, QSF_PHASE_QKV, 1200);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_QKV], 0);
    CHECK_EQ_U64(w.last_ns, 1300);
    qsf_stopwatch_set_aside(&w, QSF_PHASE_WAIT, 1400, 1450);
    qsf_stopwatch_set_aside(&w, QSF_PHASE_DECOMPRESS, 1450, 1500);
    qsf_stopwatch_lap_at(&w, QSF_PHASE_QKV, 2300);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_QKV], 900);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_WAIT], 50);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_DECOMPRESS], 50);
    /* A lap that ends before what was set aside does: the rest goes off the next one. */
    qsf_stopwatch_set_aside(&w, QSF_PHASE_WAIT, 2300, 2500);
    qsf_stopwatch_lap_at(&w, QSF_PHASE_NORM, 2400);
    qsf_stopwatch_lap_at(&w, QSF_PHASE_HEAD, 2600);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_NORM], 300);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_HEAD], 100);
    qsf_stopwatch_start(&w, 5000);
    CHECK_EQ_U64(w.phase_ns[QSF_PHASE_NORM] + w.phase_ns[QSF_PHASE_WAIT], 0);
    CHECK_EQ_U64(w.aside_ns, 0);
    CHECK_EQ_U64(w.last_ns, 5000);
    qsf_stopwatch_lap(NULL, QSF_PHASE_NORM);
    qsf_stopwatch_lap_at(NULL, QSF_PHASE_NORM, 1);
    qsf_stopwatch_set_aside(NULL, QSF_PHASE_WAIT, 1, 2);
}

int main(void)
{
    check_half_to_float();
    check_half_ties();
    check_half_extremes();
    check_arithmetic();
    check_byte_order();
    check_dtypes();
    check_fused();
    check_failures();
    check_laps();
    return check_report("check_base");
}
