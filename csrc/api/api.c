/* api.c - the exported functions: check arguments, forward. */
/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "base/status.h"
#include "machine/machine.h"
#include "engine/model.h"
#include "engine/model_open.h"
#include "engine/session.h"
#include "include/qsf.h"

#define MAX_SESSIONS 1024
#define ROOF_MIN_BYTES (64ULL << 20)
#define ROOF_MAX_MS 60000U

#define REQUIRE_POINTER(p)                                                \
    do {                                                                  \
        if ((p) == NULL)                                                  \
            return QSF_FAIL(QSF_ERR_ARG, "%s: %s is NULL", __func__, #p); \
    } while (0)

const char *qsf_version(void)
{
    return QSF_VERSION;
}

const char *qsf_error_detail(void)
{
    return qsf_fail_text();
}

qsf_status qsf_machine_describe(qsf_machine *out)
{
    REQUIRE_POINTER(out);
    return qsf_machine_look(out);
}

qsf_status qsf_machine_roof(uint32_t n_threads, uint64_t n_bytes, uint32_t n_ms, qsf_roof *out)
{
    REQUIRE_POINTER(out);
    *out = (qsf_roof){0};
    if (n_threads < 1 || n_threads > QSF_POOL_MAX_THREADS)
        return QSF_FAIL(QSF_ERR_ARG, "%u threads: 1 to %u", n_threads, QSF_POOL_MAX_THREADS);
    if (n_ms < 1 || n_ms > ROOF_MAX_MS)
        return QSF_FAIL(QSF_ERR_ARG, "%u ms: 1 to %u", n_ms, ROOF_MAX_MS);
    if (n_bytes < ROOF_MIN_BYTES || n_bytes >> 20 < n_threads)
        return QSF_FAIL(QSF_ERR_ARG, "%llu bytes for %u threads: at least %llu, and 1 MiB a thread",
                        (unsigned long long)n_bytes, n_threads, ROOF_MIN_BYTES);
    return qsf_machine_measure(n_threads, n_bytes, n_ms, out);
}

void qsf_options_default(qsf_options *out)
{
    *out = (qsf_options){
        .budget_bytes = UINT64_C(200) << 20,
        .max_sessions = 1,
        .quality = 1.0,
    };
}

static qsf_status check_kv_type(const char *name, uint32_t type, bool is_exact)
{
    if (type != QSF_KV_DEFAULT && type != QSF_KV_2BIT && type != QSF_KV_4BIT &&
        type != QSF_KV_8BIT && type != QSF_KV_F16 && type != QSF_KV_F32)
        return QSF_FAIL(QSF_ERR_ARG, "%s is %u: 2, 4, 8, 16 or 32 bits, or 0", name, type);
    if (is_exact && type != QSF_KV_DEFAULT && type != QSF_KV_F32)
        return QSF_FAIL(QSF_ERR_ARG, "%s is %u, but exact arithmetic keeps 32 bits", name, type);
    return QSF_OK;
}

static qsf_status check_io(const char *name, uint32_t method, uint32_t depth)
{
    if (method > QSF_IO_MMAP)
        return QSF_FAIL(QSF_ERR_ARG, "%s_method is %u: 0 to %d", name, method, QSF_IO_MMAP);
    if (depth > QSF_IO_MAX_DEPTH)
        return QSF_FAIL(QSF_ERR_ARG, "%s_depth is %u: at most %d", name, depth, QSF_IO_MAX_DEPTH);
    return QSF_OK;
}

static qsf_status check_options(const qsf_options *opt)
{
    if (opt->n_threads > QSF_POOL_MAX_THREADS)
        return QSF_FAIL(QSF_ERR_ARG, "%u threads: at most %u", opt->n_threads,
                        QSF_POOL_MAX_THREADS);
    if (opt->max_sessions < 1 || opt->max_sessions > MAX_SESSIONS)
        return QSF_FAIL(QSF_ERR_ARG, "max_sessions is %u: 1 to %u", opt->max_sessions,
                        MAX_SESSIONS);
    if (opt->exact > 1)
        return QSF_FAIL(QSF_ERR_ARG, "exact is %u: 0 or 1", opt->exact);
    if (!(opt->quality >= 0.0 && opt->quality <= 1.0))
        return QSF_FAIL(QSF_ERR_ARG, "quality is %g: 0 to 1", opt->quality);
    QSF_TRY(check_kv_type("kv_k_type", opt->kv_k_type, opt->exact != 0));
    QSF_TRY(check_kv_type("kv_v_type", opt->kv_v_type, opt->exact != 0));
    if (opt->kv_rotation > QSF_KV_ROTATION_ON)
        return QSF_FAIL(QSF_ERR_ARG, "kv_rotation is %u: 0, 1 or 2", opt->kv_rotation);
    QSF_TRY(check_io("io", opt->io_method, opt->io_depth));
    return check_io("io_known", opt->io_known_method, opt->io_known_depth);
}

qsf_status qsf_model_plan(const char *path, const qsf_options *opt, qsf_plan *out)
{
    REQUIRE_POINTER(path);
    REQUIRE_POINTER(opt);
    REQUIRE_POINTER(out);
    QSF_TRY(check_options(opt));
    return qsf_model_measure(path, opt, out);
}

qsf_status qsf_model_open(const char *path, const qsf_options *opt, qsf_model **out)
{
    REQUIRE_POINTER(out);
    *out = NULL;
    REQUIRE_POINTER(path);
    REQUIRE_POINTER(opt);
    QSF_TRY(check_options(opt));
    return qsf_model_create(path, opt, NULL, out);
}

void qsf_model_close(qsf_model *m)
{
    qsf_model_destroy(m);
}

void qsf_model_info(const qsf_model *m, qsf_model_facts *out)
{
    if (m != NULL && out != NULL)
        qsf_model_describe(m, out);
}

uint64_t qsf_model_section_bytes(const qsf_model *m, const char *tag)
{
    return m == NULL || tag == NULL ? 0 : qsf_model_find_section(m, tag);
}

qsf_status qsf_model_section(qsf_model *m, const char *tag, void *dst, uint64_t cap_bytes)
{
    REQUIRE_POINTER(m);
    REQUIRE_POINTER(tag);
    REQUIRE_POINTER(dst);
    return qsf_model_read_section(m, tag, dst, cap_bytes);
}

qsf_status qsf_file_verify(const char *path)
{
    REQUIRE_POINTER(path);
    return qsf_model_verify_file(path);
}

qsf_status qsf_session_create(qsf_model *m, qsf_session **out)
{
    REQUIRE_POINTER(out);
    *out = NULL;
    REQUIRE_POINTER(m);
    return qsf_session_begin(m, out);
}

void qsf_session_destroy(qsf_session *s)
{
    qsf_session_end(s);
}

qsf_status qsf_session_sync(qsf_session *s, const uint32_t *tokens, size_t n_tokens, size_t *n_done)
{
    REQUIRE_POINTER(s);
    REQUIRE_POINTER(tokens);
    REQUIRE_POINTER(n_done);
    if (n_tokens == 0)
        return QSF_FAIL(QSF_ERR_ARG, "a session is synchronised to at least one token");
    return qsf_session_advance(s, tokens, n_tokens, n_tokens, NULL, n_done);
}

qsf_status qsf_session_score(qsf_session *s, const uint32_t *tokens, size_t n_tokens,
                             size_t first_row, float *logits, size_t cap_floats, size_t *n_done)
{
    REQUIRE_POINTER(s);
    REQUIRE_POINTER(tokens);
    REQUIRE_POINTER(logits);
    REQUIRE_POINTER(n_done);
    if (n_tokens == 0)
        return QSF_FAIL(QSF_ERR_ARG, "a session is synchronised to at least one token");
    if (first_row >= n_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "the first row is %zu of %zu tokens", first_row, n_tokens);
    if (cap_floats / s->model->config.n_vocab < n_tokens - first_row)
        return QSF_FAIL(QSF_ERR_ARG, "the buffer holds %zu floats, %zu rows of %u are needed",
                        cap_floats, n_tokens - first_row, s->model->config.n_vocab);
    if (*n_done > n_tokens)
        return QSF_FAIL(QSF_ERR_ARG, "n_done is %zu of %zu tokens", *n_done, n_tokens);
    return qsf_session_advance(s, tokens, n_tokens, first_row, logits, n_done);
}

qsf_status qsf_session_step(qsf_session *s, uint32_t token)
{
    REQUIRE_POINTER(s);
    return qsf_session_append(s, token);
}

size_t qsf_session_position(const qsf_session *s)
{
    return s == NULL ? 0 : s->n_tokens;
}

qsf_status qsf_session_rewind(qsf_session *s, size_t n_tokens)
{
    REQUIRE_POINTER(s);
    return qsf_session_truncate(s, n_tokens);
}

void qsf_session_cancel(qsf_session *s)
{
    if (s != NULL)
        atomic_store(&s->cancelled, true);
}

qsf_status qsf_session_logits(const qsf_session *s, float *out, size_t cap_floats)
{
    REQUIRE_POINTER(s);
    REQUIRE_POINTER(out);
    return qsf_session_copy_logits(s, out, cap_floats);
}

void qsf_sampling_default(qsf_sampling *out)
{
    *out = (qsf_sampling){
        .repetition_penalty = 1.0f,
        .temperature = 0.7f,
        .top_k = 40,
        .top_p = 0.9f,
        .min_p = 0.0f,
    };
}

/* Written so that NaN fails. */
static qsf_status check_sampling(const qsf_sampling *how)
{
    if (!(how->repetition_penalty > 0.0f) || !isfinite(how->repetition_penalty))
        return QSF_FAIL(QSF_ERR_ARG, "repetition_penalty is %g: above 0",
                        (double)how->repetition_penalty);
    if (!(how->temperature >= 0.0f) || !isfinite(how->temperature))
        return QSF_FAIL(QSF_ERR_ARG, "temperature is %g: 0 or above", (double)how->temperature);
    if (!(how->top_p > 0.0f && how->top_p <= 1.0f))
        return QSF_FAIL(QSF_ERR_ARG, "top_p is %g: above 0, at most 1", (double)how->top_p);
    if (!(how->min_p >= 0.0f && how->min_p <= 1.0f))
        return QSF_FAIL(QSF_ERR_ARG, "min_p is %g: 0 to 1", (double)how->min_p);
    return QSF_OK;
}

qsf_status qsf_session_sample(qsf_session *s, const qsf_sampling *how, const uint32_t *recent,
                              size_t n_recent, uint64_t *random_state, uint32_t *token)
{
    REQUIRE_POINTER(s);
    REQUIRE_POINTER(how);
    REQUIRE_POINTER(random_state);
    REQUIRE_POINTER(token);
    if (n_recent > 0)
        REQUIRE_POINTER(recent);
    QSF_TRY(check_sampling(how));
    return qsf_session_choose(s, how, recent, n_recent, random_state, token);
}

void qsf_session_stats(const qsf_session *s, qsf_stats *out)
{
    if (s != NULL && out != NULL)
        qsf_session_report(s, out);
}

size_t qsf_model_timeline(qsf_model *m, qsf_unit_time *out, size_t cap_units)
{
    return m == NULL || out == NULL ? 0 : qsf_model_list_times(m, out, cap_units);
}

qsf_status qsf_model_trace(qsf_model *m, qsf_trace_event *events, size_t cap_events)
{
    REQUIRE_POINTER(m);
    if (events != NULL && cap_events == 0)
        return QSF_FAIL(QSF_ERR_ARG, "a trace of 0 events: at least 1");
    qsf_model_set_trace(m, events, cap_events);
    return QSF_OK;
}

size_t qsf_model_trace_count(qsf_model *m, uint64_t *n_dropped)
{
    if (n_dropped != NULL)
        *n_dropped = 0;
    return m == NULL ? 0 : qsf_model_count_trace(m, n_dropped);
}

size_t qsf_model_memory_events(qsf_model *m, qsf_memory_event *out, size_t cap_events)
{
    return m == NULL || out == NULL ? 0 : qsf_model_list_events(m, out, cap_events);
}
