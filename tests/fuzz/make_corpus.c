/* make_corpus.c - writes the seeds of the fuzz targets: whole files of every kind, broken ones.
 *
 * Usage: make_corpus tests/fuzz/corpus
 * The seed reader/experts is EXPERTS of tests/python/make/expert_attacks.py.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "tiny_file.h"
#include "tiny_model.h"

static tiny_file file;

static bool write_seed(const char *folder, const char *name, size_t n_bytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/reader/%s", folder, name);
    return tiny_write(path, file.bytes, n_bytes);
}

static size_t add_key(unsigned char *at, uint16_t key, uint8_t type)
{
    qsf_store_u16(at, key);
    at[2] = type;
    at[3] = 0;
    return 4;
}

static size_t add_u32(unsigned char *at, uint16_t key, uint32_t value)
{
    qsf_store_u32(at + add_key(at, key, 1), value);
    return 8;
}

static size_t add_f32(unsigned char *at, uint16_t key, float value)
{
    qsf_store_f32(at + add_key(at, key, 2), value);
    return 8;
}

/* Adds KIND, with a kind for each of the two layers, and ROPE, with two sets. */
static void add_kinds(void)
{
    unsigned char kind[128] = {2, 0, 0, 0, 0, 1};
    unsigned char rope[64] = {2};
    const tiny_options plain = {{0, 0}, false, false};
    size_t n = 12; /* behind the first kind's size */
    n += add_u32(kind + n, 16, 1);
    n += add_u32(kind + n, 36, 3);
    n += add_u32(kind + n, 37, 1);
    n += add_f32(kind + n, 39, 30.0F);
    n += add_key(kind + n, 43, 3);
    qsf_store_u32(kind + n, 2);
    qsf_store_f32(kind + n + 4, 0.5F);
    qsf_store_f32(kind + n + 8, 0.25F);
    n += 12;
    qsf_store_u32(kind + 8, (uint32_t)(n - 12));
    const size_t second = n + 4;
    n = second;
    n += add_f32(kind + n, 40, 0.1F);
    n += add_u32(kind + n, 41, 4);
    n += add_f32(kind + n, 128, 0.5F);
    qsf_store_u32(kind + second - 4, (uint32_t)(n - second));
    for (size_t i = 0; i < 2; i++) { /* sets of two pairs, 20 bytes */
        unsigned char *const set = rope + 4 + 20 * i;
        set[0] = set[1] = (unsigned char)i;
        qsf_store_u16(set + 2, 2);
        for (size_t j = 0; j < 3; j++) /* the factor and two frequencies */
            qsf_store_f32(set + 8 + 4 * j, 1.0F / (float)(1 + i + j));
    }
    tiny_add_section(&file, "KIND", 8, kind, n);
    tiny_add_section(&file, "ROPE", 8, rope, 44);
    tiny_fill_header(&file, &plain);
    repair_checksums(file.bytes, file.n_bytes);
}

static bool write_reader_seeds(const char *folder)
{
    static const struct {
        const char *name;
        tiny_options options;
    } whole[] = {
        {"plain", {{0, 0}, false, false}},
        {"tied_lz4", {{QSF_COMPRESSION_LZ4, QSF_COMPRESSION_LZ4HC}, true, false}},
        {"learned_zstd", {{QSF_COMPRESSION_ZSTD, QSF_COMPRESSION_NONE}, false, true}},
    };
    bool ok = true;
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
        tiny_build(&file, &whole[i].options);
        ok = write_seed(folder, whole[i].name, file.n_bytes) && ok;
    }
    tiny_model_build(&file, &(tiny_model){.n_layers = 1,
                                          .dtype = QSF_DTYPE_4BIT,
                                          .compression = QSF_COMPRESSION_LZ4,
                                          .has_outliers = true});
    ok = write_seed(folder, "outliers_lz4", file.n_bytes) && ok;
    tiny_build(&file, &whole[0].options);
    add_kinds();
    ok = write_seed(folder, "kinds", file.n_bytes) && ok;
    tiny_build(&file, &whole[2].options);
    /* Broken: cut off, damaged inside a compressed block, damaged with its checksums unrepaired. */
    ok = write_seed(folder, "cut_in_tables", 300) && ok;
    ok = write_seed(folder, "cut_in_layer", 9000) && ok;
    tiny_build(&file, &whole[1].options);
    const uint64_t layer_off = qsf_load_u64(repair_unit(file.bytes, file.n_bytes, 1));
    memset(file.bytes + layer_off + 20, 0xEE, 16);
    ok = write_seed(folder, "broken_lz4", file.n_bytes) && ok;
    tiny_build(&file, &whole[2].options);
    memset(file.bytes + layer_off + 20, 0xEE, 16);
    ok = write_seed(folder, "broken_zstd", file.n_bytes) && ok;
    tiny_build(&file, &whole[0].options);
    memcpy(file.bytes, "qsf1", 4);
    ok = write_seed(folder, "unrepaired", file.n_bytes) && ok;
    file.bytes[layer_off + 100] ^= 1;
    return write_seed(folder, "unrepaired_damaged", file.n_bytes) && ok;
}

/* Four bytes of options, as fuzz_model.c reads them, before each file. */
static bool write_model_seeds(const char *folder)
{
    static const struct {
        const char *name;
        unsigned char options[5];
        tiny_model model;
    } seeds[] = {
        {"llama_4bit", "\x02\x0A\x02\x00", {.n_layers = 2, .dtype = QSF_DTYPE_4BIT}},
        {"llama_f16_tied_window",
         "\x01\x27\x00\x80",
         {.n_layers = 1, .dtype = QSF_DTYPE_F16, .is_tied = true, .window_tokens = 2}},
        {"llama_lz4",
         "\x00\x02\x01\x00",
         {.n_layers = 2, .dtype = QSF_DTYPE_4BIT, .compression = QSF_COMPRESSION_LZ4}},
        {"llama_outliers",
         "\x02\x0A\x02\x00",
         {.n_layers = 2, .dtype = QSF_DTYPE_4BIT, .has_outliers = true}},
        {"gpt2_8bit",
         "\x02\x0A\x03\x20",
         {.n_layers = 1, .dtype = QSF_DTYPE_8BIT, .is_gpt2 = true}},
        {"gpt2_4bit_zstd",
         "\x01\x1F\x04\xFF",
         {.n_layers = 2,
          .dtype = QSF_DTYPE_4BIT,
          .compression = QSF_COMPRESSION_ZSTD,
          .is_gpt2 = true,
          .is_tied = true}},
    };
    bool ok = true;
    for (size_t i = 0; i < sizeof seeds / sizeof seeds[0]; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/model/%s", folder, seeds[i].name);
        static unsigned char bytes[4 + TINY_CAP_BYTES];
        tiny_model_build(&file, &seeds[i].model);
        memcpy(bytes, seeds[i].options, 4);
        memcpy(bytes + 4, file.bytes, file.n_bytes);
        ok = tiny_write(path, bytes, 4 + file.n_bytes) && ok;
    }
    return ok;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: make_corpus FOLDER\n");
        return 2;
    }
    const bool ok = write_reader_seeds(argv[1]);
    return write_model_seeds(argv[1]) && ok ? 0 : 1;
}
