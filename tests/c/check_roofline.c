/* check_roofline.c - the machine's limits: that they are measured, not what they are. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "machine/machine.h"

#define MIB (UINT64_C(1) << 20)

static void check_loops(void)
{
    static unsigned char bytes[2048];
    qsf_roofline_read_fn *const read = qsf_roofline_reader();
    CHECK_EQ_U64(read(bytes, sizeof bytes), 0);
    for (size_t i = 0; i < sizeof bytes; i += 64) { /* every line is read */
        bytes[i] = 1;
        CHECK(read(bytes, sizeof bytes) != 0);
        bytes[i] = 0;
    }
}

static void check_measuring(void)
{
    for (uint32_t n_threads = 1; n_threads <= 3; n_threads++) { /* more than cores, maybe */
        double rate;
        CHECK_OK(qsf_machine_roofline(n_threads, 64 * MIB, 1, &rate));
        CHECK(rate > 0);
    }
}

static void check_arguments(void)
{
    double rate = 1.0;
    CHECK_STATUS(qsf_machine_roofline(1, 64 * MIB, 1, NULL), QSF_ERR_ARG);
    CHECK_STATUS(qsf_machine_roofline(0, 64 * MIB, 1, &rate), QSF_ERR_ARG);
    CHECK_STATUS(qsf_machine_roofline(257, 1024 * MIB, 1, &rate), QSF_ERR_ARG);
    CHECK_STATUS(qsf_machine_roofline(1, 64 * MIB - 1, 1, &rate), QSF_ERR_ARG);
    CHECK_STATUS(qsf_machine_roofline(65, 64 * MIB, 1, &rate), QSF_ERR_ARG);
    CHECK_STATUS(qsf_machine_roofline(1, 64 * MIB, 0, &rate), QSF_ERR_ARG);
    CHECK_STATUS(qsf_machine_roofline(1, 64 * MIB, 60001, &rate), QSF_ERR_ARG);
    CHECK_STATUS(qsf_machine_roofline(1, UINT64_C(1) << 60, 1, &rate), QSF_ERR_NOMEM);
    CHECK_CONTAINS(qsf_error_detail(), "needs 1099511627776 MB");
    CHECK(rate == 0);
}

int main(void)
{
    check_loops();
    check_measuring();
    check_arguments();
    return check_report("check_roofline");
}
