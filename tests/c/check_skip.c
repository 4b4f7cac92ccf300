/* check_skip.c - a model with skipped layers is the model of a file that does not have them: the
 * same bits, the same memory, whatever the settings. Which layers those are is worked out by hand.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#define TINY_CAP_BYTES (16 << 20)
#define TINY_LAYERS 10
#define TINY_MODEL_DIM 256
#define TINY_MODEL_FFN 1024

#include <math.h>

#include "engine_rig.h"

#define PROCESS_BYTES (UINT64_C(10) << 20) /* whatever this process uses, sanitizers and all */

static char path[64];
static char cut_path[64];
static tiny_file file;

static const tiny_model llama = {.n_layers = TINY_LAYERS, .dtype = QSF_DTYPE_4BIT};

/* The ends matter least, so that only a rule keeps them; then layers 6, 3, 7, 2, 5, 4. */
static const float importances[TINY_LAYERS] = {0, 0.01F, 0.5F, 0.2F, 0.9F, 0.8F, 0.1F, 0.4F, 0, 0};

/* A model with the importances of `values`, or of all layers. */
static bool build(const tiny_model *shape, const float *values)
{
    tiny_model_build(&file, shape);
    for (uint32_t i = 0; i < shape->n_layers; i++)
        qsf_store_f32(rig_layer(&file, i) + 28, values[i]);
    return rig_write(path, &file);
}

static void set_section_bytes(const char *tag, uint64_t n_bytes)
{
    qsf_store_u64(repair_find(file.bytes, file.n_bytes, tag) + 16, n_bytes);
}

/* Takes layers out of both indexes; their weights stay behind, unknown to anyone. */
static void cut(uint64_t cut_layers)
{
    unsigned char *const units = rig_section(&file, "UNIT");
    unsigned char *const tens = rig_section(&file, "TENS");
    uint32_t new_idx[TINY_LAYERS + 2] = {0};
    uint32_t n_kept = 1; /* the embedding */
    for (uint32_t i = 1; i < TINY_LAYERS + 2; i++) {
        if (i <= TINY_LAYERS && (cut_layers >> (i - 1) & 1) != 0)
            continue;
        unsigned char *const entry = units + (size_t)n_kept * QSF_UNIT_ENTRY_BYTES;
        memmove(entry, units + (size_t)i * QSF_UNIT_ENTRY_BYTES, QSF_UNIT_ENTRY_BYTES);
        if (i <= TINY_LAYERS)
            qsf_store_u16(entry + 36, (uint16_t)(n_kept - 1));
        qsf_store_u32(entry + 44, n_kept);
        new_idx[i] = n_kept++;
    }
    uint32_t n_tensors = 0;
    for (uint32_t i = 0; i < file.n_tensors; i++) {
        unsigned char *const entry = tens + (size_t)i * QSF_TENSOR_ENTRY_BYTES;
        const uint32_t unit_idx = qsf_load_u32(entry);
        if (unit_idx != 0 && new_idx[unit_idx] == 0)
            continue;
        qsf_store_u32(entry, new_idx[unit_idx]);
        memmove(tens + (size_t)n_tensors++ * QSF_TENSOR_ENTRY_BYTES, entry, QSF_TENSOR_ENTRY_BYTES);
    }
    set_section_bytes("UNIT", (uint64_t)n_kept * QSF_UNIT_ENTRY_BYTES);
    set_section_bytes("TENS", (uint64_t)n_tensors * QSF_TENSOR_ENTRY_BYTES);
    qsf_store_u32(file.bytes + 16, n_kept - 2);
}

static qsf_options options_of(double quality, uint64_t budget_bytes)
{
    qsf_options opt = rig_options(2, 0);
    opt.budget_bytes = budget_bytes;
    opt.io_depth = 1;
    opt.io_method = QSF_IO_BUFFERED;
    opt.kv_k_type = opt.kv_v_type = QSF_KV_4BIT; /* by name, so that no budget makes it 2 bits */
    opt.quality = quality;
    return opt;
}

/* The logits after some tokens. */
static bool run(qsf_model *m, float *logits)
{
    static const uint32_t tokens[6] = {3, 1, 4, 1, 5, 9};
    qsf_session *s;
    if (m == NULL || !CHECK_OK(qsf_session_create(m, &s)))
        return false;
    rig_sync(s, tokens, 5);
    CHECK_OK(qsf_session_step(s, tokens[5]));
    const bool ok = CHECK_OK(qsf_session_logits(s, logits, TINY_MODEL_VOCAB));
    qsf_session_destroy(s);
    return ok;
}

/* ---- which layers ---- */

/* `want`: a letter for each layer, '-' for one that is skipped. */
static void check_chosen(const qsf_plan *plan, const char *want)
{
    char have[TINY_LAYERS + 1] = "";
    uint32_t n_skipped = 0;
    for (uint32_t i = 0; i < plan->n_layers; i++) {
        const bool is_skipped = plan->skipped_layers[i / 64] >> i % 64 & 1;
        have[i] = is_skipped ? '-' : 'r';
        n_skipped += is_skipped;
    }
    CHECK_STR(have, want);
    CHECK_EQ(plan->n_layers_skipped, n_skipped);
    CHECK_EQ(plan->n_units, plan->n_layers + 2 - n_skipped);
}

static void check_choices(void)
{
    static const float alike[TINY_LAYERS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 2};
    static const float odd[9] = {1, 1, 1, 1, 1, 1, 1, 1, 2};
    static const float five[5] = {1, 2, 3, 4, 5};
    static const struct {
        double quality;
        const float *values;
        uint32_t n_asked;
        const char *want;
    } cases[] = {
        {1.0, importances, 0, "rrrrrrrrrr"},
        {0.96, importances, 0, "rrrrrrrrrr"},
        {0.95, importances, 1, "rrrrrr-rrr"}, /* half a layer counts as one */
        {0.9, importances, 1, "rrrrrr-rrr"},
        {0.8, importances, 2, "rrr-rr-rrr"},
        {0.7, importances, 3, "rrr-rr--rr"},
        {0.55, importances, 5, "rr--r---rr"},
        {0.4, importances, 6, "rr------rr"},
        {0.2, importances, 8, "rr------rr"}, /* more than may be */
        {0.0, importances, 10, "rr------rr"},
        {0.9, alike, 1, "rrrr-rrrrr"}, /* the middle first, the earlier of two */
        {0.8, alike, 2, "rrrr--rrrr"},
        {0.7, alike, 3, "rrr---rrrr"},
        {0.88, odd, 1, "rrrr-rrrr"},
        {0.77, odd, 2, "rrr--rrrr"},
        {0.0, five, 5, "rr-rr"},
        {0.9, five, 1, "rr-rr"}, /* 1 - 0.9 is a little less than 0.1 */
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const qsf_options opt = options_of(cases[i].quality, 0);
        tiny_model shape = llama;
        shape.n_layers = (uint32_t)strlen(cases[i].want);
        if (!build(&shape, cases[i].values))
            return;
        qsf_plan plan;
        CHECK_OK(qsf_model_plan(path, &opt, &plan));
        check_chosen(&plan, cases[i].want);
        CHECK_EQ(plan.n_skips_asked, cases[i].n_asked);
    }
}

static void check_refusals(void)
{
    static const struct {
        uint32_t n_layers;
        double quality;
        const char *text;
    } cases[] = {
        {TINY_LAYERS, 0.99, "no importances for its 10 layers (all are 0.5)"},
        {4, 0.5, "no layer can be skipped"},
        {TINY_LAYERS, -0.01, "quality is -0.01; it must be 0 to 1"},
        {TINY_LAYERS, 1.01, "quality is 1.01; it must be 0 to 1"},
        {TINY_LAYERS, (double)NAN, "0 to 1"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const qsf_options opt = options_of(cases[i].quality, 0);
        tiny_model shape = llama;
        shape.n_layers = cases[i].n_layers;
        qsf_model *m = NULL;
        qsf_plan plan;
        if (!rig_build(path, &file, &shape)) /* all importances are 0.5 */
            return;
        CHECK_STATUS(qsf_model_open(path, &opt, &m), QSF_ERR_ARG);
        CHECK_CONTAINS(qsf_error_detail(), cases[i].text);
        CHECK(m == NULL);
        CHECK_STATUS(qsf_model_plan(path, &opt, &plan), QSF_ERR_ARG);
    }
}

/* ---- the same as without them ---- */

/* The file's layers all have a line; those that are skipped were never used. */
static void check_timeline(qsf_model *m)
{
    qsf_unit_time times[TINY_LAYERS + 2];
    memset(times, 0xFF, sizeof times);
    CHECK_EQ(qsf_model_timeline(m, times, TINY_LAYERS + 2), TINY_LAYERS + 2);
    for (uint32_t i = 0; i < TINY_LAYERS + 2; i++) {
        const bool is_layer = i > 0 && i <= TINY_LAYERS;
        const uint32_t is_skipped = is_layer && (m->plan.skipped_layers[0] >> (i - 1) & 1) ? 1 : 0;
        CHECK_EQ(times[i].is_skipped, is_skipped);
        CHECK_EQ(times[i].n_passes != 0, is_layer ? !is_skipped : i > 0 || m->config.has_tied_head);
        CHECK(!is_skipped || (times[i].compute_ns == 0 && times[i].is_resident == 0));
    }
    memset(times, 0xFF, sizeof times);
    CHECK_EQ(qsf_model_timeline(m, times, 5), TINY_LAYERS + 2);
    CHECK(times[4].n_passes != UINT64_MAX && times[5].n_passes == UINT64_MAX);
}

/* Opens in all memory or in the least, and compares with the model that lacks the layers. */
static void check_run(double quality, const float *want, const qsf_plan *without, bool is_streamed)
{
    qsf_options opt = options_of(quality, 0);
    qsf_faults known = {-1, -1, PROCESS_BYTES};
    qsf_model *m;
    float have[TINY_MODEL_VOCAB];
    if (is_streamed)
        known = rig_least_budget(path, &opt);
    if (!CHECK_OK(qsf_model_create(path, &opt, &known, &m)))
        return;
    const qsf_plan *const p = &m->plan;
    CHECK_EQ(p->streamed_bytes > 0, is_streamed);
    CHECK_EQ_U64(p->model_bytes, without->model_bytes);
    CHECK_EQ_U64(p->kv_bytes / p->ctx_tokens, without->kv_bytes / without->ctx_tokens);
    CHECK_EQ(p->n_units, without->n_units);
    /* The index of the file is longer. */
    CHECK(is_streamed ||
          p->tables_bytes - without->tables_bytes == p->engine_bytes - without->engine_bytes);
    CHECK(m->ledger.peak_bytes + p->stacks_bytes <= p->engine_bytes);
    if (run(m, have))
        CHECK_BYTES(have, want, sizeof have);
    check_timeline(m);
    qsf_model_close(m);
}

/* One shape, one quality: against the file without those layers. */
static void check_same(const tiny_model *shape, double quality)
{
    float want[TINY_MODEL_VOCAB];
    float with_all[TINY_MODEL_VOCAB];
    const qsf_options of_whole = options_of(1.0, 0);
    const qsf_options of_skipped = options_of(quality, 0);
    qsf_plan skipped;
    if (!build(shape, importances) || !CHECK_OK(qsf_model_plan(path, &of_skipped, &skipped)))
        return;
    cut(skipped.skipped_layers[0]);
    if (!rig_write(cut_path, &file))
        return;
    qsf_model *const m = rig_open(cut_path, &of_whole);
    qsf_model *const all = rig_open(path, &of_whole);
    if (run(m, want) && run(all, with_all)) {
        CHECK_EQ(m->config.n_layers, TINY_LAYERS - skipped.n_layers_skipped);
        CHECK(memcmp(want, with_all, sizeof want) != 0); /* else this shows nothing */
        CHECK(m->plan.min_budget_bytes < all->plan.min_budget_bytes);
        check_run(quality, want, &m->plan, false);
        check_run(quality, want, &m->plan, true);
    }
    qsf_model_close(all);
    qsf_model_close(m);
}

/* ---- what happens to skipped layers ---- */

static void flip_byte_of_layer(uint32_t layer)
{
    file.bytes[qsf_load_u64(rig_layer(&file, layer)) + 5000] ^= 1;
}

/* Nobody reads a skipped layer: damage there goes unseen, and elsewhere is named as in the file. */
static void check_damage(void)
{
    if (!build(&llama, importances))
        return;
    flip_byte_of_layer(3);
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    float logits[TINY_MODEL_VOCAB];
    const qsf_options less = options_of(0.8, 0);
    qsf_model *const m = rig_open(path, &less);
    CHECK(run(m, logits));
    qsf_model_close(m);

    flip_byte_of_layer(5);
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    qsf_model *none = NULL;
    CHECK_STATUS(qsf_model_open(path, &less, &none), QSF_ERR_DAMAGED);
    CHECK_CONTAINS(qsf_error_detail(), "unit 6 ");
    CHECK_STATUS(qsf_file_verify(path), QSF_ERR_DAMAGED);
    CHECK_CONTAINS(qsf_error_detail(), "unit 4 "); /* of the whole file, layer 3 is the first */
}

int main(void)
{
    check_path(path, sizeof path, "check_skip");
    check_path(cut_path, sizeof cut_path, "check_skip_cut");
    check_choices();
    check_refusals();
    check_same(&llama, 0.0);
    tiny_model shape = llama;
    shape.compression = QSF_COMPRESSION_LZ4;
    check_same(&shape, 0.7);
    shape = (tiny_model){
        .n_layers = TINY_LAYERS, .dtype = QSF_DTYPE_8BIT, .is_gpt2 = true, .is_tied = true};
    check_same(&shape, 0.5);
    check_damage();
    unlink(path);
    unlink(cut_path);
    return check_report("check_skip");
}
