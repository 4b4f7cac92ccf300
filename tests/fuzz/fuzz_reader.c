/* fuzz_reader.c - hostile files through open, verify and stream.
 *
 * An input is a file. Its checksums are repaired first, so that the fuzzer gets past them;
 * one that begins with "qsf1" is taken as it is, so that they are tried as well. Whatever
 * the outcome, nothing may be held afterwards, and what verify accepted must stream alike in
 * any split.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"
#include "format/records.h"
#include "stream/stream.h"
#include "stream/contents.h"
#include "repair.h"
#include "unit_pass.h"

#define CEILING_BYTES (UINT64_C(64) << 20)
#define BUFFER_BYTES (64U << 10)
#define MAX_PASS_BYTES (UINT64_C(16) << 20) /* a few KB of ZSTD may stand for gigabytes */

static uint64_t all_raw_bytes(const qsf_reader *r)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < r->n_units; i++)
        sum += r->units[i].raw_bytes;
    return sum;
}

/* Streams everything with the units of `resident_bits` resident; true: *digest is set. */
static int stream(qsf_reader *r, qsf_ledger *ledger, unsigned resident_bits, size_t extra_bytes,
                  size_t max_rows, uint32_t *digest)
{
    static bool is_resident[QSF_MAX_LAYERS + 2];
    for (uint32_t i = 0; i < r->n_units; i++)
        is_resident[i] = (resident_bits >> i % 8 & 1) != 0;
    pass_stream p;
    if (pass_open(&p, r, ledger, is_resident, extra_bytes) != QSF_OK)
        return 0;
    const qsf_status status = pass_all(&p.stream, max_rows, digest);
    require(status == QSF_OK || is_about_the_file(status), "the stream broke a rule");
    pass_close(&p);
    return status == QSF_OK;
}

static void read_sections(qsf_reader *r)
{
    for (uint32_t i = 0; i < r->n_sections; i++) {
        const qsf_section *const s = &r->sections[i];
        void *const bytes = malloc((size_t)s->n_bytes);
        require(bytes != NULL, "memory");
        const qsf_status status = qsf_reader_read_section(r, s, bytes);
        require(status == QSF_OK || is_about_the_file(status), "a section inside the file");
        free(bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static unsigned char file[FUZZ_FILE_BYTES];
    static unsigned char buffer[BUFFER_BYTES];
    if (n_bytes > sizeof file)
        return -1;
    memcpy(file, data, n_bytes);
    if (n_bytes >= 4 && memcmp(file, "qsf1", 4) == 0)
        memcpy(file, "QSF1", 4);
    else
        repair_checksums(file, n_bytes);
    qsf_ledger ledger;
    qsf_ledger_init(&ledger, CEILING_BYTES);
    qsf_reader r;
    if (qsf_reader_open(&r, &ledger, store(file, n_bytes), -1) == QSF_OK) {
        require(ledger.held_bytes == r.tables_bytes, "open holds more than its tables");
        if (all_raw_bytes(&r) <= MAX_PASS_BYTES) {
            read_sections(&r);
            const int is_verified = qsf_reader_verify(&r, buffer, sizeof buffer) == QSF_OK;
            const unsigned bits = file[n_bytes - 1];
            uint32_t digests[2] = {0, 0};
            const int streamed = stream(&r, &ledger, 0, 0, 1, &digests[0]);
            const int again = stream(&r, &ledger, bits, bits % 5 * 333, 1 + bits % 3, &digests[1]);
            require(!is_verified || (streamed && again), "verified, but does not stream");
            require(!(streamed && again) || digests[0] == digests[1], "two passes differ");
        }
        qsf_reader_close(&r);
    }
    require(ledger.held_bytes == 0, "memory is held after the end");
    return 0;
}
