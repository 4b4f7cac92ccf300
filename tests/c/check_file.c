/* check_file.c - exact reads: from short, missing and odd files, and when interrupted.
 *
 * This program's own pread stands in for the system's, so that interruptions and short
 * reads come when they are asked for.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_pread.h"
#include "platform/clock.h"
#include "platform/file.h"

#define FILE_BYTES 10000

static char folder[] = "check_file.XXXXXX";
static char path[64];
static unsigned char contents[FILE_BYTES];

static bool write_file(void)
{
    for (size_t i = 0; i < FILE_BYTES; i++)
        contents[i] = (unsigned char)(i * 7 + i / 251);
    FILE *const file = fopen(path, "wb");
    if (file == NULL)
        return false;
    const bool ok = fwrite(contents, 1, FILE_BYTES, file) == FILE_BYTES;
    return fclose(file) == 0 && ok;
}

static void check_reads(void)
{
    qsf_file f;
    if (!CHECK_OK(qsf_file_open(&f, path)))
        return;
    CHECK_EQ_U64(f.n_bytes, FILE_BYTES);
    CHECK_EQ(f.reads_until_fault, -1);
    static const size_t extents[][2] = {{0, FILE_BYTES}, {0, 1}, {FILE_BYTES - 1, 1}, {17, 4096},
                                        {4095, 4098},    {0, 0}, {FILE_BYTES, 0}};
    unsigned char have[FILE_BYTES + 1];
    for (size_t i = 0; i < COUNT_OF(extents); i++) {
        const size_t from = extents[i][0];
        const size_t n_bytes = extents[i][1];
        memset(have, 0xEE, sizeof have);
        CHECK_OK(qsf_file_read_at(&f, from, have, n_bytes));
        CHECK_BYTES(have, contents + from, n_bytes);
        CHECK_EQ(have[n_bytes], 0xEE);
    }
    qsf_file_close(&f);
    CHECK_EQ(f.handle, -1);
    qsf_file_close(&f); /* twice is fine */
}

static void check_interrupted_and_short(void)
{
    qsf_file f;
    if (!CHECK_OK(qsf_file_open(&f, path)))
        return;
    unsigned char have[FILE_BYTES];
    fake.n_calls = 0;
    fake.n_interrupts = 3;
    fake.most_bytes = 999;
    memset(have, 0, sizeof have);
    CHECK_OK(qsf_file_read_at(&f, 0, have, FILE_BYTES));
    CHECK_BYTES(have, contents, FILE_BYTES);
    CHECK_EQ(fake.n_calls, 3 + 11); /* else this pread was not the one in use */
    fake.n_interrupts = 0;
    fake.most_bytes = 0;

    fake.fail_errno = EIO;
    CHECK_STATUS(qsf_file_read_at(&f, 123, have, 456), QSF_ERR_IO);
    CHECK_CONTAINS(qsf_error_detail(), "123");
    CHECK_CONTAINS(qsf_error_detail(), "456");
    CHECK_CONTAINS(qsf_error_detail(), strerror(EIO));
    fake.fail_errno = 0;
    qsf_file_close(&f);
}

static void check_beyond_the_end(void)
{
    qsf_file f;
    if (!CHECK_OK(qsf_file_open(&f, path)))
        return;
    unsigned char have[FILE_BYTES];
    CHECK_STATUS(qsf_file_read_at(&f, 1, have, FILE_BYTES), QSF_ERR_FORMAT);
    CHECK_CONTAINS(qsf_error_detail(), "1 bytes early");
    CHECK_STATUS(qsf_file_read_at(&f, FILE_BYTES, have, 1), QSF_ERR_FORMAT);
    CHECK_STATUS(qsf_file_read_at(&f, INT64_MAX, have, 1), QSF_ERR_FORMAT);
    CHECK_STATUS(qsf_file_read_at(&f, (uint64_t)INT64_MAX + 1, have, 1), QSF_ERR_FORMAT);
    CHECK_STATUS(qsf_file_read_at(&f, UINT64_MAX, have, 2), QSF_ERR_FORMAT);

    /* It shrinks while it is open. */
    CHECK_EQ(truncate(path, 5000), 0);
    CHECK_EQ_U64(f.n_bytes, FILE_BYTES);
    CHECK_OK(qsf_file_read_at(&f, 4000, have, 1000));
    CHECK_STATUS(qsf_file_read_at(&f, 4000, have, 1001), QSF_ERR_FORMAT);
    CHECK_STATUS(qsf_file_read_at(&f, 9000, have, 10), QSF_ERR_FORMAT);
    qsf_file_close(&f);
    CHECK(write_file());
}

/* So many reads go well, then one does not, then all do. */
static void check_faults(void)
{
    static const struct {
        qsf_fault_kind kind;
        qsf_status want;
    } cases[] = {{QSF_FAULT_FAIL, QSF_ERR_IO},
                 {QSF_FAULT_SHORT, QSF_ERR_FORMAT},
                 {QSF_FAULT_SLOW, QSF_OK},
                 {QSF_FAULT_CORRUPT, QSF_OK}};
    qsf_file f;
    unsigned char have[9] = {[8] = 0xEE};
    if (!CHECK_OK(qsf_file_open(&f, path)))
        return;
    CHECK_EQ(f.fault_kind, QSF_FAULT_FAIL); /* the one that those get who ask for no kind */
    for (int i = 0; i < 4 * 6; i++) {
        const qsf_fault_kind kind = cases[i / 6].kind;
        const bool is_faulty = i % 6 == i / 6;
        if (i % 6 == 0)
            f.reads_until_fault = i / 6;
        f.fault_kind = kind;
        const uint64_t start_ns = qsf_clock_ns();
        const qsf_status status = qsf_file_read_at(&f, 40, have, 8);
        CHECK_STATUS(status, is_faulty ? cases[i / 6].want : QSF_OK);
        if (is_faulty && kind == QSF_FAULT_SLOW)
            CHECK(qsf_clock_ns() - start_ns >= (uint64_t)QSF_FAULT_SLOW_MS * 1000000);
        int n_other = 0;
        for (int j = 0; j < 8; j++)
            n_other += have[j] != contents[40 + j];
        if (status == QSF_OK)
            CHECK_EQ(n_other, is_faulty && kind == QSF_FAULT_CORRUPT ? 1 : 0);
        CHECK_EQ(have[8], 0xEE);
    }
    /* Nothing is there to be corrupted, and reads that fail by themselves are not counted. */
    f.reads_until_fault = 1;
    CHECK_OK(qsf_file_read_at(&f, 0, NULL, 0));
    CHECK_STATUS(qsf_file_read_at(&f, FILE_BYTES, contents, 1), QSF_ERR_FORMAT);
    CHECK_EQ(f.reads_until_fault, 0);
    CHECK_OK(qsf_file_read_at(&f, 0, NULL, 0));
    CHECK_EQ(f.reads_until_fault, -1);
    qsf_file_close(&f);
}

static void refuse(const char *name, const char *reason)
{
    qsf_file f = {.handle = 77};
    CHECK_STATUS(qsf_file_open(&f, name), QSF_ERR_IO);
    CHECK_EQ(f.handle, -1);
    CHECK_CONTAINS(qsf_error_detail(), name);
    CHECK_CONTAINS(qsf_error_detail(), reason);
    qsf_file_close(&f);
}

static int lowest_free_fd(void)
{
    const int fd = open(".", O_RDONLY);
    close(fd);
    return fd;
}

static void check_refusals(void)
{
    const int free_fd = lowest_free_fd();
    char name[128];
    snprintf(name, sizeof name, "%s/missing.qsf", folder);
    refuse(name, strerror(ENOENT));
    refuse("", strerror(ENOENT));
    refuse(folder, "a folder");
    refuse("/dev/null", "a device");
    snprintf(name, sizeof name, "%s/pipe", folder);
    if (CHECK_EQ(mkfifo(name, 0600), 0))
        refuse(name, "a pipe"); /* and does not wait for a writer */
    unlink(name);
    snprintf(name, sizeof name, "%s/below", path);
    refuse(name, strerror(ENOTDIR));
    if (geteuid() != 0) {
        CHECK_EQ(chmod(path, 0), 0);
        refuse(path, strerror(EACCES));
        CHECK_EQ(chmod(path, 0600), 0);
    }
    CHECK_EQ(lowest_free_fd(), free_fd); /* nothing stayed open */
}

static void check_empty_file(void)
{
    CHECK_EQ(truncate(path, 0), 0);
    qsf_file f;
    CHECK_OK(qsf_file_open(&f, path));
    CHECK_EQ_U64(f.n_bytes, 0);
    unsigned char have[1];
    CHECK_OK(qsf_file_read_at(&f, 0, have, 0));
    CHECK_STATUS(qsf_file_read_at(&f, 0, have, 1), QSF_ERR_FORMAT);
    qsf_file_close(&f);
}

int main(void)
{
    if (!CHECK(mkdtemp(folder) != NULL))
        return check_report("check_file");
    snprintf(path, sizeof path, "%s/model.qsf", folder);
    if (CHECK(write_file())) {
        check_reads();
        check_interrupted_and_short();
        check_beyond_the_end();
        check_faults();
        check_refusals();
        check_empty_file();
    }
    unlink(path);
    rmdir(folder);
    return check_report("check_file");
}
