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
#include "format/records.h"
#include "engine/model.h"

#define PROCESS_BYTES (UINT64_C(10) << 20) /* whatever this process uses, sanitizers and all */

static char path[64];
static char cut_path[64];
static tiny_file file;

static const tiny_model llama = {.n_layers = TINY_LAYERS, .dtype = QSF_DTYPE_4BIT};

/* The ends matter least, so that only a rule keeps them; then layers 6, 3, 7, 2, 5, 4. */
static const float importances[TINY_LAYERS] = {0, 0.01F, 0.5F, 0.2F, 0.9F, 0.8F, 0.1F, 0.4F, 0, 0};

static unsigned char *section(const char *tag)
{
    return file.bytes + qsf_load_u64(repair_find(file.bytes, file.n_bytes, tag) + 8);
}

static unsigned char *layer_entry(uint32_t layer)
{
    return repair_unit(file.bytes, file.n_bytes, layer + 1); /* behind the embedding */
}

static void set_importances(const float *values, uint32_t n_layers)
{
    for (uint32_t i = 0; i < n_layers; i++)
        qsf_store_f32(layer_entry(i) + 28, values[i]);
}

/* A model with the importances of `values`, or of all layers. */
static bool build(const tiny_model *shape, const float *values)
{
    tiny_model_build(&file, shape);
    set_importances(values, shape->n_layers);
    return rig_write(path, &file);
}

static void set_section_bytes(const char *tag, uint64_t n_bytes)
{
    qsf_store_u64(repair_find(file.bytes, file.n_bytes, tag) + 16, n_bytes);
}

/* Takes layers out of both indexes; their weights stay behind, unknown to anyone. */
static void cut(const bool *is_cut, uint32_t n_layers)
{
    unsigned char *const units = section("UNIT");
    unsigned char *const tens = section("TENS");
    uint32_t new_idx[TINY_LAYERS + 2] = {0};
    uint32_t n_kept = 1; /* the embedding */
    for (uint32_t i = 1; i < n_layers + 2; i++) {
        if (i <= n_layers && is_cut[i - 1])
            continue;
        unsigned char *const entry = units + (size_t)n_kept * QSF_UNIT_ENTRY_BYTES;
        memmove(entry, units + (size_t)i * QSF_UNIT_ENTRY_BYTES, QSF_UNIT_ENTRY_BYTES);
        if (i <= n_layers)
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

static qsf_options options_of(double quality, uint64_t budget_bytes, uint32_t n_threads)
{
    qsf_options opt = rig_options(n_threads, 0);
    opt.budget_bytes = budget_bytes;
    opt.io_depth = 1;
    opt.io_method = QSF_IO_BUFFERED;
    opt.kv_k_type = opt.kv_v_type = QSF_KV_4BIT; /* by name, so that no budget makes it 2 bits */
    opt.quality = quality;
    return opt;
}

static qsf_model *open_as(const char *from, const qsf_options *opt)
{
    const qsf_faults known = {-1, -1, PROCESS_BYTES};
    qsf_model *m = NULL;
    CHECK_OK(qsf_model_create(from, opt, &known, &m));
    return m;
}

/* Checks the logits after some tokens; with NULL for `want` takes them. */
static void run(qsf_model *m, float *take, const float *want)
{
    static const uint32_t tokens[6] = {3, 1, 4, 1, 5, 9};
    qsf_session *s;
    if (!CHECK_OK(qsf_session_create(m, &s)))
        return;
    rig_sync(s, tokens, 5);
    CHECK_OK(qsf_session_step(s, tokens[5]));
    if (want != NULL)
        rig_check_logits(s, want);
    else
        CHECK_OK(qsf_session_logits(s, take, TINY_MODEL_VOCAB));
    qsf_session_destroy(s);
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
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const qsf_options opt = options_of(cases[i].quality, 0, 1);
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

/* What the reader took at open it gives back, shorter as its index has become. */
static void check_closing(void)
{
    if (!build(&llama, importances))
        return;
    qsf_ledger ledger;
    qsf_reader r;
    qsf_ledger_init(&ledger, UINT64_MAX);
    if (!CHECK_OK(qsf_reader_open(&r, &ledger, path, -1)))
        return;
    bool is_skipped[QSF_MAX_LAYERS] = {false};
    CHECK_OK(qsf_skip_layers(&r, 0.7, is_skipped));
    qsf_reader_leave_out(&r, is_skipped);
    CHECK_EQ(r.n_pass_units, TINY_LAYERS + 2 - 3);
    CHECK_EQ(r.n_pass_layers, TINY_LAYERS - 3);
    CHECK_EQ(r.n_units, TINY_LAYERS + 2);
    qsf_reader_close(&r);
    CHECK_EQ_U64(ledger.held_bytes, 0);
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
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const qsf_options opt = options_of(cases[i].quality, 0, 1);
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

static void check_plans(const qsf_plan *whole, const qsf_plan *skipped, const qsf_plan *without)
{
    CHECK_EQ_U64(skipped->weights_bytes, without->weights_bytes);
    CHECK_EQ_U64(skipped->kv_bytes, without->kv_bytes);
    CHECK_EQ_U64(skipped->scratch_bytes, without->scratch_bytes);
    CHECK_EQ_U64(skipped->stream_bytes, without->stream_bytes);
    CHECK_EQ_U64(skipped->model_bytes, without->model_bytes);
    CHECK_EQ_U64(skipped->streamed_bytes, without->streamed_bytes);
    CHECK_EQ(skipped->n_units, without->n_units);
    CHECK_EQ(skipped->n_units_resident, without->n_units_resident);
    CHECK(skipped->kv_bytes < whole->kv_bytes);
    CHECK(skipped->model_bytes < whole->model_bytes);
    CHECK(skipped->min_budget_bytes < whole->min_budget_bytes);
    /* The index of the file is longer. */
    CHECK_EQ_U64(skipped->min_budget_bytes - without->min_budget_bytes,
                 skipped->tables_bytes - without->tables_bytes);
    CHECK(skipped->tables_bytes - without->tables_bytes < 1024 * skipped->n_layers_skipped);
}

static uint64_t least_budget_bytes(const char *from, double quality)
{
    const qsf_options opt = options_of(quality, 1, 2);
    qsf_plan plan;
    CHECK_STATUS(qsf_model_plan(from, &opt, &plan), QSF_ERR_NOMEM);
    return plan.min_budget_bytes - plan.process_bytes + PROCESS_BYTES;
}

/* The file's layers [n_layers] all have a line; those that are skipped were never used. */
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
    qsf_unit_time fewer[TINY_LAYERS + 2];
    memset(fewer, 0xFF, sizeof fewer);
    CHECK_EQ(qsf_model_timeline(m, fewer, 5), TINY_LAYERS + 2);
    CHECK_BYTES(fewer, times, 5 * sizeof *times);
    CHECK(fewer[5].n_passes == UINT64_MAX);
    qsf_model_facts facts;
    qsf_model_info(m, &facts);
    CHECK_EQ(facts.n_layers, TINY_LAYERS);
}

static void check_runs(double quality, const float *want, bool is_streamed)
{
    const uint64_t budget_bytes = is_streamed ? least_budget_bytes(path, quality) : 0;
    for (uint32_t n_threads = 1; n_threads <= 2; n_threads++) {
        const qsf_options opt = options_of(quality, budget_bytes, n_threads);
        qsf_model *const m = open_as(path, &opt);
        if (m == NULL)
            return;
        CHECK_EQ(m->plan.streamed_bytes > 0, is_streamed);
        run(m, NULL, want);
        CHECK(m->ledger.peak_bytes + m->plan.stacks_bytes <= m->plan.engine_bytes);
        check_timeline(m);
        qsf_model_close(m);
    }
}

/* One shape, one quality: against the file without those layers. */
static void check_same(const tiny_model *shape, double quality)
{
    if (!build(shape, importances))
        return;
    const qsf_options of_whole = options_of(1.0, 0, 1);
    const qsf_options of_skipped = options_of(quality, 0, 1);
    qsf_plan whole;
    qsf_plan skipped;
    CHECK_OK(qsf_model_plan(path, &of_whole, &whole));
    CHECK_OK(qsf_model_plan(path, &of_skipped, &skipped));
    bool is_cut[TINY_LAYERS];
    for (uint32_t i = 0; i < TINY_LAYERS; i++)
        is_cut[i] = skipped.skipped_layers[0] >> i & 1;
    cut(is_cut, TINY_LAYERS);
    if (!rig_write(cut_path, &file))
        return;
    qsf_model *const m = open_as(cut_path, &of_whole);
    qsf_model *const all = open_as(path, &of_whole);
    float want[TINY_MODEL_VOCAB] = {0};
    float with_all[TINY_MODEL_VOCAB] = {0};
    if (m != NULL && all != NULL) {
        run(m, want, NULL);
        run(all, with_all, NULL);
        CHECK_EQ(m->config.n_layers, TINY_LAYERS - skipped.n_layers_skipped);
        CHECK(memcmp(want, with_all, sizeof want) != 0);    /* else this shows nothing */
        const uint64_t process_bytes = whole.process_bytes; /* it grows as plans are made */
        skipped.min_budget_bytes -= skipped.process_bytes - process_bytes;
        qsf_plan without = m->plan;
        without.min_budget_bytes = without.min_budget_bytes - PROCESS_BYTES + process_bytes;
        check_plans(&whole, &skipped, &without);
        check_runs(quality, want, false);
        check_runs(quality, want, true);
    }
    qsf_model_close(all);
    qsf_model_close(m);
}

/* ---- what happens to skipped layers ---- */

static void flip_byte_of_layer(uint32_t layer)
{
    file.bytes[qsf_load_u64(layer_entry(layer)) + 5000] ^= 1;
}

/* Nobody reads a skipped layer: damage there goes unseen, and elsewhere is named as in the file. */
static void check_damage(void)
{
    if (!build(&llama, importances))
        return;
    flip_byte_of_layer(3);
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    float logits[TINY_MODEL_VOCAB];
    const qsf_options less = options_of(0.8, 0, 1);
    qsf_model *const m = open_as(path, &less);
    if (m != NULL)
        run(m, logits, NULL);
    qsf_model_close(m);

    flip_byte_of_layer(5);
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    qsf_model *none = NULL;
    CHECK_STATUS(qsf_model_open(path, &less, &none), QSF_ERR_DAMAGED);
    CHECK_CONTAINS(qsf_error_detail(), "unit 6 ");
    CHECK_STATUS(qsf_file_verify(path), QSF_ERR_DAMAGED);
    CHECK_CONTAINS(qsf_error_detail(), "unit 4 "); /* of the whole file, layer 3 is the first */
}

static void look_in_need(void *arg, qsf_pressure_signs *out)
{
    uint64_t *const now_ns = arg;
    *out = (qsf_pressure_signs){.now_ns = *now_ns, .total_bytes = UINT64_C(1) << 30};
}

static void look_in_plenty(void *arg, qsf_pressure_signs *out)
{
    uint64_t *const now_ns = arg;
    *now_ns += UINT64_C(400000000000); /* calm for longer than it ever waits */
    *out = (qsf_pressure_signs){
        .now_ns = *now_ns, .available_bytes = UINT64_C(1) << 34, .total_bytes = UINT64_C(1) << 34};
}

/* All that runs is given back and taken again; what is skipped stays away. */
static void check_pressure(void)
{
    if (!build(&llama, importances))
        return;
    const qsf_options opt = options_of(0.7, 0, 2);
    qsf_model *const m = open_as(path, &opt);
    float before[TINY_MODEL_VOCAB];
    if (m == NULL)
        return;
    m->pressure.look = NULL; /* this machine's memory is not the subject */
    run(m, before, NULL);
    const qsf_plan plan = m->plan;
    uint64_t now_ns = UINT64_C(1000000000000);
    qsf_pressure_init(&m->pressure, &(qsf_pressure_signs){now_ns, 60 << 20, 60 << 20, 0.0});
    m->pressure.pause_ns = m->pressure.next_look_ns = 0;
    m->pressure.look_arg = &now_ns;
    m->pressure.look = look_in_need;
    while (qsf_pressure_watch(m))
        ;
    CHECK_EQ(m->plan.n_units_resident, 0);
    CHECK(m->ledger.held_by_use[QSF_USE_WEIGHTS] == 0);
    CHECK(m->plan.streamed_bytes < plan.model_bytes + 1);
    m->pressure.look = NULL;
    run(m, NULL, before);
    m->pressure.look = look_in_plenty;
    for (int i = 0; i < 100; i++)
        (void)qsf_pressure_watch(m);
    CHECK_EQ(m->plan.n_units_resident, TINY_LAYERS + 2 - 3);
    CHECK_EQ_U64(m->plan.weights_bytes, plan.weights_bytes);
    m->pressure.look = NULL;
    run(m, NULL, before);
    check_chosen(&m->plan, "rrr-rr--rr");
    check_timeline(m);
    qsf_model_close(m);
}

int main(void)
{
    check_path(path, sizeof path, "check_skip");
    check_path(cut_path, sizeof cut_path, "check_skip_cut");
    check_choices();
    check_refusals();
    check_closing();
    check_same(&llama, 0.8);
    check_same(&llama, 0.0);
    tiny_model shape = llama;
    shape.compression = QSF_COMPRESSION_LZ4;
    check_same(&shape, 0.7);
    shape = (tiny_model){.n_layers = TINY_LAYERS, .dtype = QSF_DTYPE_8BIT, .is_gpt2 = true};
    shape.is_tied = true;
    check_same(&shape, 0.5);
    check_damage();
    check_pressure();
    unlink(path);
    unlink(cut_path);
    return check_report("check_skip");
}
