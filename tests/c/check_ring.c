/* check_ring.c - reading ahead gives the file's bytes, whatever the ring, the method and the
 * faults.
 *
 * Units are made up: the ring wants of a reader no more than where they lie and their checksums.
 * A watchdog ends the program if something waits for ever.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/checked.h"
#include "check.h"
#include "checksum/crc32.h"
#include "stream/ring.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "sanitized.h"

#define N_UNITS 7
#define CAP_BYTES ((size_t)3 << 20)
#define CEILING_BYTES (UINT64_C(64) << 20)
#define WATCHDOG_S 240

static const char path[] = "check_ring.bin";
/* Sizes below, at and above pieces; none but the last is a multiple of 4096. */
static const uint64_t unit_bytes[N_UNITS] = {700001, 1, 4095, 99999, 524289, 4097, 8192};
static unsigned char bytes[CAP_BYTES];
static size_t n_file_bytes;
static qsf_unit units[N_UNITS];
static size_t stride;
static size_t n_cases; /* of passes */

static bool store(void)
{
    FILE *const f = fopen(path, "wb");
    const bool ok = f != NULL && fwrite(bytes, 1, n_file_bytes, f) == n_file_bytes;
    return (f == NULL || fclose(f) == 0) && ok;
}

/* The last unit ends where the file does. */
static bool build(void)
{
    for (size_t i = 0; i < CAP_BYTES; i++)
        bytes[i] = (unsigned char)check_draw(256);
    uint64_t off = 4096;
    for (uint32_t i = 0; i < N_UNITS; i++) {
        units[i] =
            (qsf_unit){.off = off, .stored_bytes = unit_bytes[i], .raw_bytes = unit_bytes[i]};
        units[i].crc32 = qsf_crc32(0, bytes + off, (size_t)unit_bytes[i]);
        off += qsf_round_up((size_t)unit_bytes[i], QSF_UNIT_ALIGN);
    }
    n_file_bytes = (size_t)(units[N_UNITS - 1].off + unit_bytes[N_UNITS - 1]);
    return store();
}

typedef struct opened {
    qsf_ledger ledger;
    qsf_reader reader;
    qsf_io io;
    qsf_ring *ring;
    size_t range_bytes;
} opened;

static const uint32_t order[] = {1, 2, 3, 4, 0, 6, 5}; /* not that of the file */
#define N_ALWAYS 5

static qsf_status open_ring(opened *o, qsf_io_setup setup, size_t range_bytes, size_t extra_bytes)
{
    *o =
        (opened){.range_bytes = range_bytes, .reader = {.units = units, .n_stream_units = N_UNITS}};
    qsf_ledger_init(&o->ledger, CEILING_BYTES);
    QSF_TRY(qsf_file_open(&o->reader.file, path));
    qsf_status status = qsf_io_open(&o->io, &o->reader.file, setup.method);
    if (status == QSF_OK)
        status = qsf_ring_create(&o->ring, &o->reader, &o->ledger, &o->io, &setup,
                                 qsf_ring_least_bytes(range_bytes) + extra_bytes, range_bytes);
    if (status != QSF_OK) {
        qsf_io_close(&o->io);
        qsf_file_close(&o->reader.file);
        return status;
    }
    qsf_ring_set_order(o->ring, order, N_UNITS, N_ALWAYS);
    return QSF_OK;
}

static void close_ring(opened *o)
{
    qsf_ring_destroy(o->ring);
    qsf_io_close(&o->io);
    qsf_file_close(&o->reader.file);
    CHECK_EQ_U64(o->ledger.held_bytes, 0);
}

/* Takes random ascending spans of a unit; those taken are compared with the file. */
static qsf_status pass_unit(opened *o, uint32_t unit_idx)
{
    const qsf_unit *const u = &units[unit_idx];
    uint64_t wait_ns = 0;
    uint64_t read_ns = 0;
    QSF_TRY(qsf_ring_begin_unit(o->ring, unit_idx));
    for (uint64_t off = check_draw(3) == 0 ? check_draw((uint32_t)u->stored_bytes) : 0;
         off < u->stored_bytes;) {
        const size_t most_bytes = qsf_ring_range_bytes(o->ring, off);
        CHECK(most_bytes >= o->range_bytes);
        size_t n_bytes = check_draw(4) == 0 ? most_bytes : 1 + check_draw((uint32_t)most_bytes);
        if (n_bytes > u->stored_bytes - off)
            n_bytes = (size_t)(u->stored_bytes - off);
        const unsigned char *have = NULL;
        QSF_TRY(qsf_ring_take(o->ring, off, n_bytes, &wait_ns, &have));
        CHECK_EQ_U64((uintptr_t)have % 64, off % 64);
        CHECK_BYTES(have, bytes + u->off + off, n_bytes);
        off += n_bytes + (check_draw(5) == 0 ? check_draw(5000) : 0); /* some are never looked at */
    }
    QSF_TRY(qsf_ring_end_unit(o->ring, &wait_ns, &read_ns));
    CHECK(read_ns > 0);
    return QSF_OK;
}

static qsf_status pass(opened *o, bool is_whole, const qsf_cancel *cancel)
{
    qsf_ring_begin_pass(o->ring, is_whole, cancel, NULL);
    for (uint32_t i = 0; i < (is_whole ? N_UNITS : N_ALWAYS); i++)
        QSF_TRY(pass_unit(o, order[i]));
    return QSF_OK;
}

static void check_passes(qsf_io_setup setup)
{
    static const size_t spans[] = {1, 5000, 66000};
    static const size_t extras[] = {0, 40960, 2 << 20};
    for (size_t s = 0; s < COUNT_OF(spans); s++) {
        for (size_t e = 0; e < COUNT_OF(extras); e++) {
            if (n_cases++ % stride != 0)
                continue;
            opened o;
            if (!CHECK_OK(open_ring(&o, setup, spans[s], extras[e])))
                return;
            uint64_t needed_bytes = 0;
            for (int i = 0; i < 4; i++) {
                const bool is_whole = check_draw(2) == 0;
                CHECK_OK(pass(&o, is_whole, NULL));
                for (uint32_t u = 0; u < (is_whole ? N_UNITS : N_ALWAYS); u++)
                    needed_bytes += unit_bytes[order[u]];
            }
            const qsf_ring_counts counts = qsf_ring_count(o.ring);
            CHECK(counts.read_bytes >= needed_bytes && counts.busy_ns > 0);
            /* Reading ahead is useful: nothing was dropped and read again. */
            CHECK(counts.read_bytes <= needed_bytes + qsf_ring_least_bytes(spans[s]) + extras[e]);
            /* Units in any order, and abandoned ones. */
            for (int i = 0; i < 20; i++) {
                const uint32_t unit_idx = check_draw(N_UNITS);
                uint64_t wait_ns = 0;
                const unsigned char *have = NULL;
                CHECK_OK(pass_unit(&o, unit_idx));
                CHECK_OK(qsf_ring_begin_unit(o.ring, unit_idx));
                if (check_draw(2) == 0)
                    CHECK_OK(qsf_ring_take(o.ring, unit_bytes[unit_idx] - 1, 1, &wait_ns, &have));
                qsf_ring_abandon(o.ring);
            }
            CHECK_OK(qsf_ring_begin_unit(o.ring, 4)); /* closed in the middle */
            close_ring(&o);
        }
    }
}

/* The order can change between units, also to nothing. */
static void check_orders(qsf_io_setup setup)
{
    opened o;
    if (!CHECK_OK(open_ring(&o, setup, 5000, 102400)))
        return;
    CHECK_OK(pass(&o, true, NULL));
    qsf_ring_set_order(o.ring, order, 0, 0);
    CHECK_STATUS(qsf_ring_begin_unit(o.ring, 1), QSF_ERR_ARG);
    static const uint32_t others[] = {4};
    qsf_ring_set_order(o.ring, others, 1, 1);
    for (int i = 0; i < 3; i++) {
        qsf_ring_begin_pass(o.ring, false, NULL, NULL);
        CHECK_OK(pass_unit(&o, 4));
    }
    CHECK_STATUS(qsf_ring_begin_unit(o.ring, 1), QSF_ERR_ARG);
    qsf_ring_set_order(o.ring, order, N_UNITS, N_ALWAYS);
    CHECK_OK(pass(&o, true, NULL));
    CHECK_OK(qsf_ring_begin_unit(o.ring, 1));
    CHECK_STATUS(qsf_ring_begin_unit(o.ring, 2), QSF_ERR_ARG);
    qsf_ring_abandon(o.ring);
    o.reader.file.fault_kind = QSF_FAULT_SLOW; /* waited for; the rest arrives meanwhile */
    o.reader.file.reads_until_fault = 5;
    CHECK_OK(pass(&o, true, NULL));
    close_ring(&o);
}

/* The N-th read goes wrong in each way. No wrong byte is given out under a good end of its unit,
 * the error is typed, and after it the ring works. */
static void check_faults(qsf_io_setup setup)
{
    static const qsf_fault_kind kinds[] = {QSF_FAULT_FAIL, QSF_FAULT_SHORT, QSF_FAULT_CORRUPT};
    static const qsf_status wanted[] = {QSF_ERR_IO, QSF_ERR_FORMAT, QSF_ERR_DAMAGED};
    for (size_t k = 0; k < COUNT_OF(kinds); k++) {
        uint32_t n_failed = 0;
        for (int64_t n = 0; n < 300; n += (1 + n / 4) * (int64_t)stride) {
            opened o;
            if (!CHECK_OK(open_ring(&o, setup, 5000, 20480)))
                return;
            uint64_t wait_ns = 0;
            uint64_t read_ns = 0;
            o.reader.file.fault_kind = kinds[k];
            o.reader.file.reads_until_fault = n;
            qsf_status status = QSF_OK;
            qsf_ring_begin_pass(o.ring, true, NULL, NULL);
            for (uint32_t i = 0; i < N_UNITS && status == QSF_OK; i++) {
                status = qsf_ring_begin_unit(o.ring, order[i]);
                if (status == QSF_OK)
                    status = qsf_ring_end_unit(o.ring, &wait_ns, &read_ns);
            }
            n_failed += status != QSF_OK;
            if (status != QSF_OK) {
                CHECK_STATUS(status, wanted[k]);
                qsf_ring_abandon(o.ring);
            }
            o.reader.file.reads_until_fault = -1;
            if (status != QSF_OK)
                CHECK_OK(pass(&o, true, NULL));
            close_ring(&o);
        }
        CHECK(n_failed > 5 / (uint32_t)stride); /* else nothing was injected */
    }
}

/* The file shrinks under way. What was read before may still be good. */
static void check_truncated(qsf_io_setup setup)
{
    opened o;
    if (!CHECK_OK(open_ring(&o, setup, 5000, 20480)))
        return;
    CHECK_OK(pass(&o, true, NULL));
    CHECK(truncate(path, (off_t)units[4].off + 70000) == 0);
    qsf_status status = QSF_OK;
    for (int i = 0; i < 3 && status == QSF_OK; i++)
        status = pass(&o, true, NULL);
    CHECK_STATUS(status, QSF_ERR_FORMAT);
    qsf_ring_abandon(o.ring);
    CHECK(store());
    CHECK_OK(pass(&o, true, NULL));
    close_ring(&o);
}

typedef struct canceller {
    atomic_bool cancelled;
    uint64_t after_ns;
} canceller;

static void *cancel_later(void *arg)
{
    canceller *const c = arg;
    const uint64_t until_ns = qsf_clock_ns() + c->after_ns;
    while (qsf_clock_ns() < until_ns)
        usleep(100);
    atomic_store(&c->cancelled, true);
    return NULL;
}

/* A wait for a slow disk ends when it is cancelled, and the pieces of the slow read come to no
 * harm afterwards. */
static void check_cancel(qsf_io_setup setup)
{
    for (uint32_t i = 0; i < 4; i++) {
        canceller c = {.after_ns = 1000000 + i * 3000000};
        const atomic_bool *const flags[] = {&c.cancelled};
        const qsf_cancel cancel = {flags, 1};
        qsf_thread thread;
        opened o;
        if (!CHECK_OK(open_ring(&o, setup, 5000, 20480)))
            return;
        o.reader.file.fault_kind = QSF_FAULT_SLOW;
        o.reader.file.reads_until_fault = i;
        if (!CHECK_OK(qsf_thread_start(&thread, 65536, cancel_later, &c)))
            return;
        qsf_status status = QSF_OK;
        for (int n = 0; n < 1000 && status == QSF_OK; n++)
            status = pass(&o, true, &cancel);
        qsf_thread_join(&thread);
        CHECK_STATUS(status, QSF_ERR_CANCELLED);
        qsf_ring_abandon(o.ring);
        if (i % 2 == 0)
            CHECK_OK(pass(&o, true, NULL));
        close_ring(&o);
    }
}

/* Opens the file without a ring. */
static bool open_file(opened *o, uint32_t method, uint64_t ceiling_bytes)
{
    *o = (opened){.range_bytes = 64, .reader = {.units = units, .n_stream_units = N_UNITS}};
    qsf_ledger_init(&o->ledger, ceiling_bytes);
    return CHECK_OK(qsf_file_open(&o->reader.file, path)) &&
           CHECK_OK(qsf_io_open(&o->io, &o->reader.file, method));
}

/* A reader that cannot even begin, here for want of descriptors, fails every pass: nobody waits for
 * it for ever. */
static void check_no_queue(qsf_io_setup setup)
{
    struct rlimit before;
    opened o;
    if (setup.method != QSF_IO_URING || !CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0) ||
        !open_file(&o, setup.method, CEILING_BYTES))
        return;
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    const bool is_made = CHECK_OK(qsf_ring_create(&o.ring, &o.reader, &o.ledger, &o.io, &setup,
                                                  qsf_ring_least_bytes(64), 64));
    for (int i = 0; i < 3 && is_made; i++) {
        qsf_ring_set_order(o.ring, order, N_UNITS, N_ALWAYS);
        CHECK_STATUS(pass(&o, true, NULL), QSF_ERR_UNSUPPORTED);
        qsf_ring_abandon(o.ring);
    }
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    close_ring(&o);
}

/* Nothing is leaked when memory or threads cannot be had. */
static void check_create(qsf_io_setup setup)
{
    opened o = {.reader = {.n_stream_units = N_UNITS}};
    const size_t ring_bytes = qsf_ring_least_bytes(5000);
    const uint64_t needed_bytes = qsf_ring_bytes(ring_bytes, 5000, &o.reader);
    if (!open_file(&o, setup.method, needed_bytes))
        return;
    for (uint64_t i = 0; i < 2; i++) { /* then a byte is missing */
        o.ledger.ceiling_bytes -= i;
        CHECK_STATUS(
            qsf_ring_create(&o.ring, &o.reader, &o.ledger, &o.io, &setup, ring_bytes, 5000),
            i == 0 ? QSF_OK : QSF_ERR_NOMEM);
        CHECK_EQ_U64(o.ledger.held_bytes, i == 0 ? needed_bytes : 0);
        CHECK_EQ(o.ring != NULL, i == 0);
        qsf_ring_destroy(o.ring);
    }
    o.ring = NULL;
    close_ring(&o);
}

int main(void)
{
    static const qsf_io_setup setups[] = {
        {QSF_IO_BUFFERED, 1, false}, {QSF_IO_BUFFERED, 4, false}, {QSF_IO_DIRECT, 1, false},
        {QSF_IO_DIRECT, 3, false},   {QSF_IO_URING, 1, false},    {QSF_IO_URING, 8, false},
        {QSF_IO_MMAP, 2, false},     {QSF_IO_DIRECT, 8, false},   {QSF_IO_BUFFERED, 8, true},
    };
    stride = check_stride();
    (void)alarm(WATCHDOG_S);
    if (!CHECK(build()))
        return check_report("check_ring");
    for (size_t i = 0; i < COUNT_OF(setups); i++) {
        opened o;
        const qsf_status status = open_ring(&o, setups[i], 64, 0);
        if (status == QSF_ERR_UNSUPPORTED) {
            printf("check_ring: %s is skipped: %s\n", qsf_io_method_name(setups[i].method),
                   qsf_error_detail());
            continue;
        }
        if (!CHECK_OK(status))
            continue;
        close_ring(&o);
        check_passes(setups[i]);
        check_orders(setups[i]);
        check_faults(setups[i]);
        check_truncated(setups[i]);
        check_cancel(setups[i]);
        check_create(setups[i]);
        check_no_queue(setups[i]);
    }
    remove(path);
    return check_report("check_ring");
}
