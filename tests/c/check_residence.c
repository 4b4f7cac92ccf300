/* check_residence.c - which units stay: runs between streamed units are as equal as can be, no
 * room is wasted that a unit would fit into, and sizes may be anything.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "check.h"
#include "plan/plan.h"
#include "synthetic_units.h"

#define MANY_LAYERS 4096

static synthetic_units units;
static bool is_resident[SYNTHETIC_MAX_UNITS];
static bool before[SYNTHETIC_MAX_UNITS];

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* The longest run around the circle, found by starting behind each streamed unit. */
static uint64_t longest_run(const qsf_reader *r)
{
    uint64_t longest_bytes = 0;
    for (uint32_t start = 0; start < r->n_stream_units; start++) {
        if (is_resident[start] || (start == 0 && !r->arch.tied_head))
            continue;
        uint64_t run_bytes = 0;
        for (uint32_t k = 1; k < r->n_stream_units; k++) {
            const uint32_t i = (start + k) % r->n_stream_units;
            if (i == 0 && !r->arch.tied_head)
                continue;
            if (!is_resident[i])
                break;
            run_bytes += r->units[i].raw_bytes;
        }
        longest_bytes = larger(run_bytes, longest_bytes);
    }
    return longest_bytes;
}

static uint32_t count_layers(const qsf_reader *r)
{
    uint32_t n = 0;
    for (uint32_t i = 1; i < r->n_stream_units - 1; i++)
        n += is_resident[i];
    return n;
}

/* Layers of one size: room for k keeps k and the head, and every run is shorter than an equal
 * share of the circle, unless the head alone is not. */
static void check_spread(uint32_t n_layers, uint64_t layer_bytes, uint64_t head_bytes, bool is_tied)
{
    synthetic_make(&units, n_layers, layer_bytes, is_tied);
    qsf_reader *const r = &units.reader;
    uint64_t end_bytes = units.units[n_layers + 1].raw_bytes = head_bytes;
    if (is_tied) {
        units.units[n_layers + 1].raw_bytes = 64;
        units.units[0].raw_bytes = head_bytes;
        end_bytes += 64;
    }
    const uint64_t total_bytes = n_layers * layer_bytes + end_bytes;
    for (uint32_t k = 0; k <= n_layers; k++) {
        memset(is_resident, 0, sizeof is_resident);
        const uint64_t exact_bytes = end_bytes + k * layer_bytes;
        const uint64_t room_bytes = exact_bytes + (k % 3) * (layer_bytes - 1) / 2;
        CHECK_EQ_U64(qsf_residence_add(r, room_bytes, is_resident), exact_bytes);
        CHECK_EQ(count_layers(r), k);
        CHECK(is_resident[n_layers + 1]);
        CHECK_EQ(is_resident[0], is_tied);
        const uint64_t run_bytes = qsf_residence_longest_run_bytes(r, is_resident);
        CHECK_EQ_U64(run_bytes, longest_run(r));
        if (k < n_layers)
            CHECK(run_bytes <=
                  larger(end_bytes, total_bytes / (n_layers - k)) + n_layers + layer_bytes / 1000);
        else
            CHECK_EQ_U64(run_bytes, 0);
    }
    /* Too little for the head: layers all the same. */
    memset(is_resident, 0, sizeof is_resident);
    if (head_bytes > layer_bytes) {
        CHECK(qsf_residence_add(r, layer_bytes + 64, is_resident) >= layer_bytes);
        CHECK_EQ(count_layers(r), 1);
        CHECK(is_tied || !is_resident[n_layers + 1]);
    }
}

/* Any sizes, some units kept already: no more than the room is taken, and nothing fits any more. */
static void check_any_sizes(uint32_t n_layers, uint64_t scale)
{
    synthetic_make(&units, n_layers, 1, check_draw(2) == 0);
    const qsf_reader *const r = &units.reader;
    uint64_t total_bytes = 0;
    for (uint32_t i = 0; i < r->n_stream_units; i++) {
        units.units[i].raw_bytes = 64 + check_draw(1000) * scale;
        total_bytes += units.units[i].raw_bytes;
        before[i] = check_draw(8) == 0;
    }
    memcpy(is_resident, before, sizeof before);
    const uint64_t room_bytes = total_bytes / 4096 * (check_draw(4096));
    const uint64_t kept_bytes = qsf_residence_add(r, room_bytes, is_resident);
    CHECK(kept_bytes <= room_bytes);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < r->n_stream_units; i++) {
        CHECK(is_resident[i] || !before[i]);
        sum += is_resident[i] && !before[i] ? r->units[i].raw_bytes : 0;
        if (i == 0 && !r->arch.tied_head)
            CHECK_EQ(is_resident[0], before[0]);
        else
            CHECK(is_resident[i] || r->units[i].raw_bytes > room_bytes - kept_bytes);
    }
    CHECK_EQ_U64(sum, kept_bytes);
    CHECK_EQ_U64(qsf_residence_longest_run_bytes(r, is_resident), longest_run(r));
}

/* Sums beyond 2^64. */
static void check_hostile(void)
{
    const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX / 2, UINT64_C(1) << 63, UINT64_MAX - 63};
    const uint64_t rooms[] = {0, 1, UINT64_C(1) << 40, UINT64_MAX / 2, UINT64_MAX};
    for (size_t s = 0; s < 4; s++)
        for (size_t room = 0; room < 5; room++) {
            synthetic_make(&units, 7, sizes[s], true);
            memset(is_resident, 0, sizeof is_resident);
            CHECK(qsf_residence_add(&units.reader, rooms[room], is_resident) <= rooms[room]);
            (void)qsf_residence_longest_run_bytes(&units.reader, is_resident);
        }
}

/* Layers that a pass runs several times stay before others, and before the head. */
static void check_looped(void)
{
    synthetic_make(&units, 8, 1000, false);
    qsf_reader *const r = &units.reader;
    r->arch.loop_begin = 3;
    r->arch.loop_end = 6;
    r->arch.loop_passes = 3;
    for (uint16_t i = 0; i < 8; i++)
        units.units[1 + i].layer = i;
    memset(is_resident, 0, sizeof is_resident);
    CHECK_EQ_U64(qsf_residence_add(r, 3000, is_resident), 3000);
    for (uint32_t i = 0; i < 8; i++)
        CHECK_EQ(is_resident[1 + i], i >= 3 && i < 6);
    CHECK_EQ(qsf_reader_visited(r, 5), 5);
    CHECK_EQ(qsf_reader_visited(r, 11), 5);
    CHECK_EQ(qsf_reader_visited(r, 12), 6);
    r->arch.loop_end = 0;
}

int main(void)
{
    check_looped();
    const uint32_t counts[] = {1, 2, 3, 5, 22, 31, 32, 33, 80};
    const uint64_t heads[] = {64, 74000, 112000, 300000};
    for (size_t i = 0; i < COUNT_OF(counts); i++)
        for (size_t h = 0; h < COUNT_OF(heads); h++) {
            check_spread(counts[i], 112000, heads[h], false);
            check_spread(counts[i], 112000, heads[h], true);
            check_spread(counts[i], UINT64_C(112000) << 30, heads[h] << 30, false);
        }
    check_spread(MANY_LAYERS / 8, 112000, 300000, false);
    for (uint32_t i = 0; i < 2000; i++)
        check_any_sizes(1 + check_draw(40), i % 2 == 0 ? 1 : UINT64_C(1) << 40);
    check_any_sizes(MANY_LAYERS, UINT64_C(1) << 24);
    check_hostile();
    return check_report("check_residence");
}
