/* ceiling.c - the arithmetic of ceiling.h. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/ceiling.h"

#include <stdbool.h>

#include "base/checked.h"

#define MIB (UINT64_C(1) << 20)
#define LEAST_AUTO_BYTES (200 * MIB)

static bool is_known(const qsf_supply *s)
{
    return s->available_bytes != 0 || s->limit_bytes != 0;
}

/* Resident and available bytes, less kept_bytes; never 0, because 0 means no limit. */
static uint64_t supply_without(const qsf_supply *s, uint64_t kept_bytes)
{
    const uint64_t taken_bytes =
        s->available_bytes > kept_bytes ? s->available_bytes - kept_bytes : 0;
    const uint64_t sum = qsf_add_capped(s->process_bytes, taken_bytes);
    return sum > 0 ? sum : 1;
}

uint64_t qsf_ceiling_margin_bytes(const qsf_supply *s)
{
    if (s->limit_bytes != 0) {
        const uint64_t share_bytes = s->limit_bytes / 100;
        return qsf_add_capped(share_bytes > 2 * MIB ? share_bytes : 2 * MIB, s->locked_bytes);
    }
    const uint64_t share_bytes = s->available_bytes / 16;
    return share_bytes < 256 * MIB ? share_bytes : 256 * MIB;
}

uint64_t qsf_ceiling_bytes(const qsf_supply *s, uint64_t budget_bytes)
{
    if (!is_known(s))
        return budget_bytes;
    const uint64_t supply_bytes = supply_without(s, qsf_ceiling_margin_bytes(s));
    return budget_bytes == 0 || budget_bytes > supply_bytes ? supply_bytes : budget_bytes;
}

uint64_t qsf_ceiling_auto_budget_bytes(const qsf_supply *s)
{
    if (!is_known(s))
        return LEAST_AUTO_BYTES;
    const uint64_t half_bytes = qsf_add_capped(s->process_bytes, s->available_bytes) / 2;
    return half_bytes > LEAST_AUTO_BYTES ? half_bytes : LEAST_AUTO_BYTES;
}
