/* options.c - the defaults and ranges of a model's options, and which layers are skipped. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/model.h"

#include <math.h>
#include <string.h>

#include "base/status.h"
#include "format/records.h"
#include "io/io.h"
#include "kernels/kernels.h"
#include "platform/pool.h"

#define MAX_SESSIONS 1024
#define MAX_LOGITS_ROWS 4096

void qsf_options_default(qsf_options *out)
{
    *out = (qsf_options){
        .budget_bytes = QSF_BUDGET_AUTO,
        .max_sessions = 1,
        .quality = 1.0,
    };
}

static qsf_status check_kv_type(const char *name, uint32_t type, bool is_exact)
{
    QSF_FAIL_IF(type != QSF_KV_DEFAULT && type != QSF_KV_2BIT && type != QSF_KV_4BIT &&
                    type != QSF_KV_8BIT && type != QSF_KV_F16 && type != QSF_KV_F32,
                ARG, "%s is %u; it must be 2, 4, 8, 16 or 32 bits, or 0", name, type);
    QSF_FAIL_IF(is_exact && type != QSF_KV_DEFAULT && type != QSF_KV_F32, ARG,
                "%s is %u, but exact arithmetic needs 32 bits", name, type);
    return QSF_OK;
}

static qsf_status check_io(uint32_t method, uint32_t depth)
{
    QSF_FAIL_IF(method > QSF_IO_MMAP, ARG, "io_method is %u; it must be 0 to %d", method,
                QSF_IO_MMAP);
    QSF_FAIL_IF(depth > QSF_IO_MAX_DEPTH, ARG, "io_depth is %u; it must be at most %d", depth,
                QSF_IO_MAX_DEPTH);
    return QSF_OK;
}

qsf_status qsf_options_check(const qsf_options *opt)
{
    QSF_FAIL_IF(opt->n_threads > QSF_POOL_MAX_THREADS, ARG,
                "n_threads is %u; it must be at most %u", opt->n_threads, QSF_POOL_MAX_THREADS);
    QSF_FAIL_IF(opt->max_sessions < 1 || opt->max_sessions > MAX_SESSIONS, ARG,
                "max_sessions is %u; it must be 1 to %u", opt->max_sessions, MAX_SESSIONS);
    QSF_FAIL_IF(opt->kv_contexts > opt->max_sessions, ARG,
                "kv_contexts is %u; it must be at most max_sessions, %u", opt->kv_contexts,
                opt->max_sessions);
    QSF_FAIL_IF(opt->logits_rows > MAX_LOGITS_ROWS, ARG, "logits_rows is %u; it must be at most %u",
                opt->logits_rows, MAX_LOGITS_ROWS);
    QSF_FAIL_IF(opt->draft_rows > QSF_MAX_DRAFT_ROWS, ARG,
                "draft_rows is %u; it must be at most %u", opt->draft_rows, QSF_MAX_DRAFT_ROWS);
    QSF_FAIL_IF(opt->draft_path != NULL && opt->draft_rows == 0, ARG,
                "draft_path is set, but draft_rows is 0: set it to 1 to %u", QSF_MAX_DRAFT_ROWS);
    QSF_FAIL_IF(opt->kv_window_tokens != 0 && opt->kv_window_tokens < QSF_KV_PAGE_TOKENS, ARG,
                "kv_window_tokens is %u; it must be at least %u, or 0", opt->kv_window_tokens,
                QSF_KV_PAGE_TOKENS);
    QSF_FAIL_IF(opt->kv_pinned_tokens != 0 && opt->kv_window_tokens == 0, ARG,
                "kv_pinned_tokens is %u, but kv_window_tokens is 0", opt->kv_pinned_tokens);
    QSF_FAIL_IF(opt->kv_folder != NULL && (opt->kv_window_tokens != 0 || opt->kv_contexts != 0),
                ARG, "kv_folder is set, so %s must be 0: %s",
                opt->kv_window_tokens != 0 ? "kv_window_tokens" : "kv_contexts",
                opt->kv_window_tokens != 0 ? "nothing is forgotten"
                                           : "each session has memory of its own");
    QSF_FAIL_IF(opt->kv_folder == NULL && opt->kv_resident_tokens != 0, ARG,
                "kv_resident_tokens is %u, but kv_folder is NULL", opt->kv_resident_tokens);
    QSF_FAIL_IF(opt->ctx_is_fixed > 1, ARG, "ctx_is_fixed is %u; it must be 0 or 1",
                opt->ctx_is_fixed);
    QSF_FAIL_IF(opt->exact > 1, ARG, "exact is %u; it must be 0 or 1", opt->exact);
    QSF_FAIL_IF(opt->n_adapters > QSF_MAX_ADAPTERS || (opt->n_adapters > 0 && !opt->adapters), ARG,
                "n_adapters is %u; it must be at most %d, with as many adapters", opt->n_adapters,
                QSF_MAX_ADAPTERS);
    for (uint32_t i = 0; i < opt->n_adapters; i++)
        QSF_FAIL_IF(opt->adapters[i].path == NULL || !isfinite(opt->adapters[i].scale), ARG,
                    "adapter %u has no path, or the scale %g, which is not finite", i,
                    (double)opt->adapters[i].scale);
    QSF_FAIL_IF(!(opt->quality >= 0.0 && opt->quality <= 1.0), ARG,
                "quality is %g; it must be 0 to 1", opt->quality);
    QSF_TRY(check_kv_type("kv_k_type", opt->kv_k_type, opt->exact != 0));
    QSF_TRY(check_kv_type("kv_v_type", opt->kv_v_type, opt->exact != 0));
    QSF_FAIL_IF(opt->kv_rotation > QSF_KV_ROTATION_ON, ARG,
                "kv_rotation is %u; it must be 0, 1 or 2", opt->kv_rotation);
    return check_io(opt->io_method, opt->io_depth);
}

/* ---- skipped layers ---- */

#define N_KEPT_AT_AN_END 2

_Static_assert(QSF_SKIP_WORDS * 64 >= QSF_MAX_LAYERS, "a bit for every layer");

/* 1 - 0.9 is a little less than 0.1; half a layer of five must still be rounded up. */
#define ROUNDING_SLACK 1e-9

static uint32_t count_asked(uint32_t n_layers, double quality)
{
    return (uint32_t)floor((1.0 - quality) * n_layers + 0.5 + ROUNDING_SLACK);
}

static float importance_of(const qsf_reader *r, uint32_t layer)
{
    return qsf_reader_layer(r, layer)->importance;
}

static bool has_importances(const qsf_reader *r)
{
    for (uint32_t i = 1; i < qsf_reader_trunk_layers(r); i++)
        if (importance_of(r, i) != importance_of(r, 0))
            return true;
    return false;
}

/* Returns the distance in half layers. */
static uint32_t distance_to_middle(const qsf_reader *r, uint32_t layer)
{
    const uint32_t last = qsf_reader_trunk_layers(r) - 1;
    return 2 * layer > last ? 2 * layer - last : last - 2 * layer;
}

static bool goes_before(const qsf_reader *r, uint32_t a, uint32_t b)
{
    if (importance_of(r, a) != importance_of(r, b))
        return importance_of(r, a) < importance_of(r, b);
    if (distance_to_middle(r, a) != distance_to_middle(r, b))
        return distance_to_middle(r, a) < distance_to_middle(r, b);
    return a < b;
}

/* Layers at the ends always run, and those whose keys and values others read. */
static bool can_skip(const qsf_reader *r, uint32_t layer)
{
    for (uint32_t i = layer + 1; i < qsf_reader_trunk_layers(r); i++)
        if (qsf_reader_layer_kind(r, i)->kv_source == layer + 1)
            return false;
    return layer >= N_KEPT_AT_AN_END && layer + N_KEPT_AT_AN_END < qsf_reader_trunk_layers(r);
}

/* Marks one more layer. */
static void skip_next(const qsf_reader *r, bool *is_skipped)
{
    uint32_t next = UINT32_MAX;
    for (uint32_t i = 0; i < qsf_reader_trunk_layers(r); i++)
        if (can_skip(r, i) && !is_skipped[i] && (next == UINT32_MAX || goes_before(r, i, next)))
            next = i;
    is_skipped[next] = true;
}

qsf_status qsf_skip_layers(const qsf_reader *r, double quality, bool *is_skipped)
{
    const uint32_t n_layers = qsf_reader_trunk_layers(r);
    if (quality >= 1.0)
        return QSF_OK;
    QSF_FAIL_IF(r->arch.block_layers != 0, ARG,
                "quality %g: no layer can be skipped: its residual blocks need all %u layers",
                quality, n_layers);
    QSF_FAIL_IF(n_layers <= 2 * N_KEPT_AT_AN_END, ARG,
                "quality %g: no layer can be skipped: the first two and the last two always run, "
                "and this model has %u layers",
                quality, n_layers);
    QSF_FAIL_IF(!has_importances(r), ARG,
                "quality %g: the file has no importances for its %u layers (all are %g); "
                "qsf convert --calibration makes a file that has them",
                quality, n_layers, (double)importance_of(r, 0));
    uint32_t n_skippable = 0;
    for (uint32_t i = 0; i < n_layers; i++)
        n_skippable += can_skip(r, i);
    uint32_t n_skips = count_asked(n_layers, quality);
    if (n_skips > n_skippable)
        n_skips = n_skippable;
    for (uint32_t i = 0; i < n_skips; i++)
        skip_next(r, is_skipped);
    return QSF_OK;
}

void qsf_skip_describe(const qsf_reader *r, double quality, qsf_plan *plan)
{
    plan->n_layers = qsf_reader_trunk_layers(r);
    plan->n_layers_skipped = 0;
    plan->n_skips_asked = count_asked(plan->n_layers, quality);
    memset(plan->skipped_layers, 0, sizeof plan->skipped_layers);
    if (quality >= 1.0) /* then layers are left out that are other stages' */
        return;
    plan->n_layers_skipped = plan->n_layers - (r->n_pass_layers - (r->has_mtp ? 1 : 0));
    uint32_t layer = 0;
    for (uint32_t i = 0; i < r->n_pass_layers; i++, layer++) /* gaps between the remaining layers */
        for (; layer < qsf_reader_layer(r, i)->layer; layer++)
            plan->skipped_layers[layer / 64] |= UINT64_C(1) << layer % 64;
}
