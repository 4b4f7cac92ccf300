/* check_ceiling.c - how much of what a machine or a control group has left a plan may use. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"
#include "plan/plan.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

static void check_unknown(void)
{
    const qsf_supply s = {.process_bytes = 40 * MIB};
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), 0);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 5 * GIB), 5 * GIB);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 200 * MIB);
}

/* Outside of groups a sixteenth stays free, at most 256 MiB; an automatic budget is half. */
static void check_machine(void)
{
    qsf_supply s = {.process_bytes = 40 * MIB, .available_bytes = 1600 * MIB};
    CHECK_EQ_U64(qsf_ceiling_margin_bytes(&s), 100 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), 1540 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 200 * MIB), 200 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 1540 * MIB + 1), 1540 * MIB);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 820 * MIB);
    s.available_bytes = 64 * GIB;
    CHECK_EQ_U64(qsf_ceiling_margin_bytes(&s), 256 * MIB);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 32 * GIB + 20 * MIB);
    s.available_bytes = 100 * MIB; /* the ceiling bounds the least budget */
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 200 * MIB);
}

/* In a group: a hundredth of the limit, at least 2 MiB, and nothing for others. */
static void check_group(void)
{
    qsf_supply s = {40 * MIB, 250 * MIB, 300 * MIB, 0};
    CHECK_EQ_U64(qsf_ceiling_margin_bytes(&s), 3 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 300 * MIB), 287 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 200 * MIB), 200 * MIB);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), 200 * MIB);
    s.locked_bytes = MIB; /* page cache that cannot be reclaimed */
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 300 * MIB), 286 * MIB);
    s.locked_bytes = 0;
    s.limit_bytes = 150 * MIB;
    s.available_bytes = 50 * MIB;
    CHECK_EQ_U64(qsf_ceiling_margin_bytes(&s), 2 * MIB);
    s.available_bytes = 0; /* a full group is known to be full */
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), 40 * MIB);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, GIB), 40 * MIB);
    s.process_bytes = 0; /* never 0, which would mean no ceiling */
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), 1);
}

static void check_huge(void)
{
    const qsf_supply s = {UINT64_MAX - 5, UINT64_MAX - 5, 0, 0};
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, 0), UINT64_MAX);
    CHECK_EQ_U64(qsf_ceiling_bytes(&s, UINT64_MAX - 1), UINT64_MAX - 1);
    CHECK_EQ_U64(qsf_ceiling_auto_budget_bytes(&s), UINT64_MAX / 2);
}

int main(void)
{
    check_unknown();
    check_machine();
    check_group();
    check_huge();
    return check_report("check_ceiling");
}
