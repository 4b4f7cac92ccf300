/* options.c - the defaults and ranges of a model's options. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/options.h"

#include "base/status.h"
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
    if (type != QSF_KV_DEFAULT && type != QSF_KV_2BIT && type != QSF_KV_4BIT &&
        type != QSF_KV_8BIT && type != QSF_KV_F16 && type != QSF_KV_F32)
        return QSF_FAIL(QSF_ERR_ARG, "%s is %u; it must be 2, 4, 8, 16 or 32 bits, or 0", name,
                        type);
    if (is_exact && type != QSF_KV_DEFAULT && type != QSF_KV_F32)
        return QSF_FAIL(QSF_ERR_ARG, "%s is %u, but exact arithmetic needs 32 bits", name, type);
    return QSF_OK;
}

static qsf_status check_io(uint32_t method, uint32_t depth)
{
    if (method > QSF_IO_MMAP)
        return QSF_FAIL(QSF_ERR_ARG, "io_method is %u; it must be 0 to %d", method, QSF_IO_MMAP);
    if (depth > QSF_IO_MAX_DEPTH)
        return QSF_FAIL(QSF_ERR_ARG, "io_depth is %u; it must be at most %d", depth,
                        QSF_IO_MAX_DEPTH);
    return QSF_OK;
}

qsf_status qsf_options_check(const qsf_options *opt)
{
    if (opt->n_threads > QSF_POOL_MAX_THREADS)
        return QSF_FAIL(QSF_ERR_ARG, "n_threads is %u; it must be at most %u", opt->n_threads,
                        QSF_POOL_MAX_THREADS);
    if (opt->max_sessions < 1 || opt->max_sessions > MAX_SESSIONS)
        return QSF_FAIL(QSF_ERR_ARG, "max_sessions is %u; it must be 1 to %u", opt->max_sessions,
                        MAX_SESSIONS);
    if (opt->kv_contexts > opt->max_sessions)
        return QSF_FAIL(QSF_ERR_ARG, "kv_contexts is %u; it must be at most max_sessions, %u",
                        opt->kv_contexts, opt->max_sessions);
    if (opt->logits_rows > MAX_LOGITS_ROWS)
        return QSF_FAIL(QSF_ERR_ARG, "logits_rows is %u; it must be at most %u", opt->logits_rows,
                        MAX_LOGITS_ROWS);
    if (opt->draft_rows > QSF_MAX_DRAFT_ROWS)
        return QSF_FAIL(QSF_ERR_ARG, "draft_rows is %u; it must be at most %u", opt->draft_rows,
                        QSF_MAX_DRAFT_ROWS);
    if (opt->draft_path != NULL && opt->draft_rows == 0)
        return QSF_FAIL(QSF_ERR_ARG, "draft_path is set, but draft_rows is 0: set it to 1 to %u",
                        QSF_MAX_DRAFT_ROWS);
    if (opt->kv_window_tokens != 0 && opt->kv_window_tokens < QSF_KV_PAGE_TOKENS)
        return QSF_FAIL(QSF_ERR_ARG, "kv_window_tokens is %u; it must be at least %u, or 0",
                        opt->kv_window_tokens, QSF_KV_PAGE_TOKENS);
    if (opt->kv_pinned_tokens != 0 && opt->kv_window_tokens == 0)
        return QSF_FAIL(QSF_ERR_ARG, "kv_pinned_tokens is %u, but kv_window_tokens is 0",
                        opt->kv_pinned_tokens);
    if (opt->kv_folder != NULL && (opt->kv_window_tokens != 0 || opt->kv_contexts != 0))
        return QSF_FAIL(QSF_ERR_ARG, "kv_folder is set, so %s must be 0: %s",
                        opt->kv_window_tokens != 0 ? "kv_window_tokens" : "kv_contexts",
                        opt->kv_window_tokens != 0 ? "nothing is forgotten"
                                                   : "each session has memory of its own");
    if (opt->kv_folder == NULL && opt->kv_resident_tokens != 0)
        return QSF_FAIL(QSF_ERR_ARG, "kv_resident_tokens is %u, but kv_folder is NULL",
                        opt->kv_resident_tokens);
    if (opt->ctx_is_fixed > 1)
        return QSF_FAIL(QSF_ERR_ARG, "ctx_is_fixed is %u; it must be 0 or 1", opt->ctx_is_fixed);
    if (opt->exact > 1)
        return QSF_FAIL(QSF_ERR_ARG, "exact is %u; it must be 0 or 1", opt->exact);
    if (!(opt->quality >= 0.0 && opt->quality <= 1.0))
        return QSF_FAIL(QSF_ERR_ARG, "quality is %g; it must be 0 to 1", opt->quality);
    QSF_TRY(check_kv_type("kv_k_type", opt->kv_k_type, opt->exact != 0));
    QSF_TRY(check_kv_type("kv_v_type", opt->kv_v_type, opt->exact != 0));
    if (opt->kv_rotation > QSF_KV_ROTATION_ON)
        return QSF_FAIL(QSF_ERR_ARG, "kv_rotation is %u; it must be 0, 1 or 2", opt->kv_rotation);
    return check_io(opt->io_method, opt->io_depth);
}
