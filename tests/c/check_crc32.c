/* check_crc32.c - each way to compute the checksum against its definition, and joining. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "checksum/crc32.h"
#include "checksum/crc32_ways.h"
#include "system.h"

#define MAX_BYTES 600
#define N_STARTS 16
#define LARGE_BYTES 70000 /* all loops of every way, several times */

static unsigned char bytes[LARGE_BYTES + N_STARTS];
/* Bit by bit, from the polynomial; the register, not its complement. */
static uint32_t by_definition(uint32_t state, const unsigned char *p, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        state ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ ((state & 1) != 0 ? 0xEDB88320U : 0U);
    }
    return state;
}

/* Values that zlib gives; the first is the check value of the catalogues. */
static void check_known(qsf_crc32_fn *fn)
{
    unsigned char data[256] = {0};
    CHECK_EQ_U64((uint32_t)~fn(UINT32_MAX, (const unsigned char *)"123456789", 9), 0xCBF43926);
    CHECK_EQ_U64((uint32_t)~fn(UINT32_MAX, data, 32), 0x190A55AD);
    for (unsigned i = 0; i < 256; i++)
        data[i] = (unsigned char)i;
    CHECK_EQ_U64((uint32_t)~fn(UINT32_MAX, data, 256), 0x29058C73);
}

/* Every length at every alignment, from the usual register, from none and from any. What lies
 * before and after the bytes is not read: the heap's own guard finds that under AddressSanitizer.
 */
static void check_lengths(qsf_crc32_fn *fn)
{
    for (size_t start = 0; start < N_STARTS; start++) {
        const uint32_t firsts[3] = {UINT32_MAX, 0, check_draw(UINT32_MAX)};
        for (size_t k = 0; k < 3; k++) {
            uint32_t want = firsts[k];
            for (size_t n = 0; n <= MAX_BYTES; n++) {
                CHECK_EQ_U64(fn(firsts[k], bytes + start, n), want);
                want = by_definition(want, bytes + start + n, 1);
            }
        }
    }
    for (size_t n = 1; n <= MAX_BYTES; n++) {
        unsigned char *const exact = malloc(n);
        memcpy(exact, bytes, n);
        CHECK_EQ_U64(fn(UINT32_MAX, exact, n), by_definition(UINT32_MAX, bytes, n));
        free(exact);
    }
}

/* Lengths that go through the long loops, whole and in parts. */
static void check_parts(qsf_crc32_fn *fn)
{
    for (int round = 0; round < 100; round++) {
        const size_t start = check_draw(N_STARTS);
        const size_t n_bytes = check_draw(LARGE_BYTES + 1);
        const uint32_t want = by_definition(UINT32_MAX, bytes + start, n_bytes);
        CHECK_EQ_U64(fn(UINT32_MAX, bytes + start, n_bytes), want);
        uint32_t state = UINT32_MAX;
        for (size_t at = 0; at < n_bytes;) {
            const size_t n_left = n_bytes - at;
            const size_t n = check_draw(round % 2 == 0 ? 40000 : 700);
            state = fn(state, bytes + start + at, n < n_left ? n : n_left);
            at += n < n_left ? n : n_left;
        }
        CHECK_EQ_U64(state, want);
    }
}

/* The one that the engine calls: it goes on from a checksum, not from a register. */
static void check_running(void)
{
    const uint32_t whole = ~by_definition(UINT32_MAX, bytes, MAX_BYTES);
    for (size_t split = 0; split <= MAX_BYTES; split++)
        CHECK_EQ_U64(qsf_crc32(qsf_crc32(0, bytes, split), bytes + split, MAX_BYTES - split),
                     whole);
}

static void check_choice(void)
{
    const char *const wanted = getenv("QSF_ISA");
    char before[32] = "";
    if (wanted != NULL)
        snprintf(before, sizeof before, "%s", wanted);
    const bool has_clmul = qsf_crc32_way_fn(QSF_CRC32_CLMUL) != NULL;
    const bool has_clmul512 = qsf_crc32_way_fn(QSF_CRC32_CLMUL512) != NULL;
    const bool has_arm = qsf_crc32_way_fn(QSF_CRC32_ARM) != NULL;
    const qsf_crc32_way narrow = has_clmul ? QSF_CRC32_CLMUL : QSF_CRC32_TABLES_WAY;
    const qsf_crc32_way best = has_arm ? QSF_CRC32_ARM : has_clmul512 ? QSF_CRC32_CLMUL512 : narrow;
    const struct {
        const char *level;
        qsf_crc32_way want;
    } cases[] = {
        {"scalar", QSF_CRC32_TABLES_WAY},
        {"avxvnni", has_arm ? best : narrow},
        {"amx", best},
        {"neon", best},
        {"", best},
        {"no such level", best},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        setenv("QSF_ISA", cases[i].level, 1);
        CHECK_STR(qsf_crc32_way_name(qsf_crc32_choose()), qsf_crc32_way_name(cases[i].want));
    }
    unsetenv("QSF_ISA");
    CHECK_STR(qsf_crc32_way_name(qsf_crc32_choose()), qsf_crc32_way_name(best));
    if (wanted != NULL)
        setenv("QSF_ISA", before, 1);
}

/* The product, bit by bit. */
static uint32_t multiply_by_definition(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = UINT32_C(1) << 31; bit != 0; bit >>= 1) {
        product ^= (a & bit) != 0 ? b : 0;
        b = b >> 1 ^ ((b & 1) != 0 ? 0xEDB88320U : 0);
    }
    return product;
}

/* crc_a with n zero bytes after it, by squaring as often as n has bits and without tables. */
static uint32_t shift_by_definition(uint32_t crc_a, uint64_t n_bytes)
{
    uint32_t power = UINT32_C(1) << 31 >> 8; /* x^8 */
    for (; n_bytes != 0; n_bytes >>= 1) {
        if ((n_bytes & 1) != 0)
            crc_a = multiply_by_definition(crc_a, power);
        power = multiply_by_definition(power, power);
    }
    return crc_a;
}

static void check_combine(void)
{
    for (int round = 0; round < 1000; round++) {
        const size_t n_bytes = check_draw(3000);
        const size_t split = round % 10 == 0   ? 0
                             : round % 10 == 1 ? n_bytes
                                               : check_draw((uint32_t)n_bytes);
        const uint32_t a = qsf_crc32(0, bytes, split);
        const uint32_t b = qsf_crc32(0, bytes + split, n_bytes - split);
        CHECK_EQ_U64(qsf_crc32_combine(a, b, n_bytes - split), qsf_crc32(0, bytes, n_bytes));
        const uint32_t c = check_draw(UINT32_MAX);
        CHECK_EQ_U64(qsf_crc32_multiply(a, c), multiply_by_definition(a, c));
    }
    /* Lengths that no test can read: around 4 GiB, the period, 2^61 (whose bits overflow). */
    const uint64_t lengths[] = {UINT64_C(1) << 32, UINT32_MAX,          UINT32_MAX - 1,
                                UINT64_C(5) << 30, UINT64_C(1) << 61,   (UINT64_C(1) << 61) + 1,
                                UINT64_MAX,        UINT64_C(1) << 63,   (UINT64_C(1) << 33) - 2,
                                0x123456789ABCDEF, UINT64_C(3900) << 20};
    for (size_t i = 0; i < COUNT_OF(lengths); i++)
        for (int round = 0; round < 10; round++) {
            const uint32_t a = check_draw(UINT32_MAX);
            const uint32_t b = check_draw(UINT32_MAX);
            const uint64_t n = lengths[i] - (round < 5 ? 0 : check_draw(1000));
            CHECK_EQ_U64(qsf_crc32_combine(a, b, n), shift_by_definition(a, n) ^ b);
        }
    /* And the definition of that itself: a run of zero bytes. */
    static const unsigned char zeros[4096];
    uint32_t zero_crc = 0x12345678;
    for (int i = 0; i < 16; i++)
        zero_crc = by_definition(zero_crc, zeros, sizeof zeros);
    CHECK_EQ_U64(shift_by_definition(0x12345678, 16 * sizeof zeros), zero_crc);
}

int main(void)
{
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)check_draw(256);
    for (int way = 0; way < QSF_CRC32_WAY_COUNT; way++) {
        qsf_crc32_fn *const fn = qsf_crc32_way_fn((qsf_crc32_way)way);
        const char *const name = qsf_crc32_way_name((qsf_crc32_way)way);
        printf(fn != NULL ? "%s\n" : "%s: skipped, this machine lacks it\n", name);
        if (fn == NULL)
            continue;
        check_known(fn);
        check_lengths(fn);
        check_parts(fn);
    }
    printf("chosen: %s\n", qsf_crc32_way_name(qsf_crc32_choose()));
    check_running();
    check_choice();
    check_combine();
    return check_report("check_crc32");
}
