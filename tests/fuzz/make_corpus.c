/* make_corpus.c - writes the seeds of the fuzz targets: whole files of every kind, broken ones.
 *
 * Usage: make_corpus tests/fuzz/corpus
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
    tiny_build(&file, &whole[2].options);
    /* Broken: cut off, damaged inside a compressed block, damaged with its checksums unrepaired. */
    ok = write_seed(folder, "cut_in_tables", 300) && ok;
    ok = write_seed(folder, "cut_in_layer", 9000) && ok;
    tiny_build(&file, &whole[1].options);
    const unsigned char *const layr = repair_find(file.bytes, file.n_bytes, "LAYR");
    const uint64_t layer_off = qsf_load_u64(file.bytes + qsf_load_u64(layr + 8));
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
