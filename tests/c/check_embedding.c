/* check_embedding.c - the cache of embedding rows against a plain list; failures. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "base/asan.h"
#include "check.h"
#include "format/records.h"
#include "model/forward.h"
#include "system.h"
#include "tiny_file.h"
#include "unit_pass.h"

#define N_STEPS 3000

static const char path[] = "check_embedding.qsf";
static const uint32_t capacities[] = {0, 1, 2, 7, 8, 64};

static tiny_file file;
static float reference[TINY_VOCAB][TINY_DIM]; /* by a resident table */
static qsf_kernels kernels;

/* The stored file, its layers resident. */
static bool open_stream(pass_file *o, bool is_table_resident)
{
    return CHECK_OK(pass_open_file(o, path, is_table_resident ? 15 : 14, 0));
}

static qsf_status ask(pass_file *o, qsf_embedding *e, uint32_t token, float *x)
{
    return qsf_embedding_row(e, &o->pass.stream, &kernels, &o->reader.tensors[0], token, x);
}

typedef struct cache_block {
    void *at;
    size_t n_bytes;
} cache_block;

/* A cache with a block of its own, for free_block(). */
static qsf_embedding make_cache(uint32_t n_rows, uint32_t n_vocab, uint32_t dim, cache_block *block)
{
    const qsf_config config = {.n_vocab = n_vocab, .dim = dim};
    qsf_embedding e;
    qsf_arena arena;
    qsf_arena_init_measuring(&arena);
    qsf_embedding_layout(&e, &arena, &config, n_rows);
    const size_t n_bytes = arena.used_bytes;
    CHECK((n_bytes == 0) == (n_rows == 0) && n_bytes % QSF_ARENA_ALIGN == 0);
    block->n_bytes = n_bytes > 0 ? n_bytes : QSF_ARENA_ALIGN; /* an arena wants a block */
    block->at = check_alloc(QSF_ARENA_ALIGN, block->n_bytes);
    if (!CHECK(block->at != NULL))
        exit(check_report("check_embedding"));
    memset(block->at, 0, block->n_bytes);
    qsf_arena_init(&arena, block->at, n_bytes);
    qsf_embedding_layout(&e, &arena, &config, n_rows);
    CHECK(!arena.failed);
    CHECK_EQ_U64(arena.used_bytes, n_bytes);
    CHECK_EQ_U64(e.n_rows, n_rows < n_vocab ? n_rows : n_vocab);
    return e;
}

static void free_block(const cache_block *block)
{
    QSF_ASAN_UNPOISON(block->at, block->n_bytes);
    check_free(block->at);
}

/* What a cache should hold, newest first. */
typedef struct plain_list {
    uint32_t tokens[TINY_VOCAB];
    uint32_t n_used;
    uint32_t cap;
} plain_list;

/* Where the token is; n_used: nowhere. */
static uint32_t list_find(const plain_list *l, uint32_t token)
{
    uint32_t i = 0;
    while (i < l->n_used && l->tokens[i] != token)
        i++;
    return i;
}

/* A token found at `at`, or not, becomes the newest. */
static void list_use(plain_list *l, uint32_t token, uint32_t at)
{
    if (l->cap == 0)
        return;
    if (at == l->n_used && l->n_used < l->cap)
        l->n_used++;
    const uint32_t n_moved = at < l->n_used ? at : l->n_used - 1;
    memmove(l->tokens + 1, l->tokens, n_moved * sizeof *l->tokens);
    l->tokens[0] = token;
}

/* Both ways along the order of use. */
static void check_order(const qsf_embedding *e, const plain_list *l)
{
    CHECK_EQ_U64(e->n_used, l->n_used);
    if (e->n_rows == 0)
        return;
    uint32_t down = 0;
    uint32_t up = 0;
    for (uint32_t i = 0; i < l->n_used; i++) {
        down = e->older[down];
        up = e->newer[up];
        if (!CHECK(down != 0 && up != 0))
            return;
        CHECK_EQ_U64(e->tokens[down], l->tokens[i]);
        CHECK_EQ_U64(e->tokens[up], l->tokens[l->n_used - 1 - i]);
    }
    CHECK(e->older[down] == 0 && e->newer[up] == 0);
}

/* Every word, a few that come often, and words that share a bucket. */
static uint32_t draw_token(int step)
{
    const uint32_t kind = check_draw(3);
    if (step < N_STEPS / 3 || kind == 0)
        return check_draw(TINY_VOCAB);
    return kind == 1 ? check_draw(5) * 7 : check_draw(TINY_VOCAB / 8) * 8 + 3;
}

/* Some reads fail, where there are any: at a step in eight the next read would. */
static void check_sequence(pass_file *o, uint32_t n_rows)
{
    cache_block block;
    qsf_embedding e = make_cache(n_rows, TINY_VOCAB, TINY_DIM, &block);
    plain_list list = {.cap = e.n_rows};
    uint64_t n_requested = 0;
    uint64_t n_hits = 0;
    uint32_t n_failed = 0;
    for (int step = 0; step < N_STEPS; step++) {
        float x[TINY_DIM];
        const uint32_t token = draw_token(step);
        const uint32_t at = list_find(&list, token);
        const bool is_kept = at < list.n_used;
        const uint64_t before_bytes = o->pass.stream.band_bytes_read;
        o->reader.file.reads_until_fault = check_draw(8) == 0 ? 0 : -1;
        const bool may_fail = o->reader.file.reads_until_fault == 0 && !is_kept;
        const qsf_status status = ask(o, &e, token, x);
        o->reader.file.reads_until_fault = -1;
        if (status != QSF_OK) {
            CHECK(may_fail);
            CHECK_EQ(status, QSF_ERR_IO);
            n_failed++;
        } else {
            CHECK_BYTES(x, reference[token], sizeof x);
            CHECK(!is_kept || o->pass.stream.band_bytes_read == before_bytes);
            list_use(&list, token, at);
            n_requested++;
            n_hits += is_kept;
        }
        check_order(&e, &list);
        CHECK_EQ_U64(e.n_requested, n_requested);
        CHECK_EQ_U64(e.n_hits, n_hits);
    }
    CHECK(n_rows >= TINY_VOCAB || n_failed > 0);
    CHECK((n_hits > 0) == (n_rows > 0));
    CHECK_EQ_U64(e.n_used, e.n_rows);
    free_block(&block);
}

/* The band that is asked for is damaged in the file: no row of it is kept. */
static void check_damage(void)
{
    pass_file o;
    cache_block block;
    float x[TINY_DIM];
    if (!open_stream(&o, false))
        return;
    qsf_embedding e = make_cache(7, TINY_VOCAB, TINY_DIM, &block);
    CHECK_OK(ask(&o, &e, 20, x));
    unsigned char *const band =
        file.bytes + o.reader.units[0].off + o.reader.tensors[0].data_off; /* the first */
    band[5] ^= 1;
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(ask(&o, &e, 3, x), QSF_ERR_DAMAGED);
    CHECK_OK(ask(&o, &e, 20, x));
    CHECK_BYTES(x, reference[20], sizeof x);
    CHECK(e.n_used == 1 && e.n_requested == 2 && e.n_hits == 1);
    band[5] ^= 1;
    CHECK(tiny_write(path, file.bytes, file.n_bytes));
    CHECK_OK(ask(&o, &e, 3, x));
    CHECK_BYTES(x, reference[3], sizeof x);
    free_block(&block);
    CHECK_EQ_U64(pass_close_file(&o), 0);
}

/* Its rows by the definition, and nothing counted or kept. */
static void check_resident(void)
{
    pass_file o;
    cache_block block;
    if (!open_stream(&o, true))
        return;
    qsf_embedding e = make_cache(7, TINY_VOCAB, TINY_DIM, &block);
    const qsf_tensor *const t = &o.reader.tensors[0];
    const unsigned char *const table = file.bytes + o.reader.units[0].off + t->data_off;
    for (uint32_t token = 0; token < TINY_VOCAB; token++) {
        float want[TINY_DIM];
        CHECK_OK(ask(&o, &e, token, reference[token]));
        const size_t band_bytes = TINY_DIM / QSF_BLOCK * qsf_dtype_tile_bytes(t->dtype);
        kernels.dequant_row[t->dtype](table + token / QSF_TILE_ROWS * band_bytes,
                                      TINY_DIM / QSF_BLOCK, token % QSF_TILE_ROWS, want);
        CHECK_BYTES(reference[token], want, sizeof want);
    }
    CHECK(e.n_used == 0 && e.n_requested == 0 && e.n_hits == 0);
    free_block(&block);
    CHECK_EQ_U64(pass_close_file(&o), 0);
}

int main(void)
{
    tiny_build(&file, &(tiny_options){{0, 0}, false, false});
    if (!CHECK(tiny_write(path, file.bytes, file.n_bytes)))
        return check_report("check_embedding");
    qsf_isa isa;
    CHECK_OK(qsf_isa_choose(&isa));
    qsf_kernels_init(&kernels, isa);
    check_resident();
    for (size_t i = 0; i < COUNT_OF(capacities); i++) {
        pass_file o;
        if (!open_stream(&o, false))
            continue;
        check_sequence(&o, capacities[i]);
        CHECK_EQ_U64(pass_close_file(&o), 0);
    }
    check_damage();
    remove(path);
    return check_report("check_embedding");
}
