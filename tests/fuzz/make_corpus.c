/* make_corpus.c - writes the seeds of the fuzz targets: whole files, and broken ones. Those with
 * kinds of layers, experts and own embeddings: make_expert_seeds.py.
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
    static const tiny_options plain = {{0, 0}, false, false};
    static const tiny_options lz4 = {{QSF_COMPRESSION_LZ4, QSF_COMPRESSION_LZ4HC}, true, false};
    static const tiny_options zstd = {{QSF_COMPRESSION_ZSTD, QSF_COMPRESSION_NONE}, false, true};
    static const struct {
        const char *name;
        const tiny_options *options;
        size_t n_bytes; /* 0: all */
        size_t broken;  /* bytes from 20 of the first layer on */
        bool is_raw;    /* fuzz_reader.c does not repair its checksums */
    } seeds[] = {
        {"plain", &plain, 0, 0, false},
        {"tied_lz4", &lz4, 0, 0, false},
        {"learned_zstd", &zstd, 0, 0, false},
        {"cut_in_tables", &zstd, 300, 0, false},
        {"cut_in_layer", &zstd, 9000, 0, false},
        {"broken_lz4", &lz4, 0, 16, false},
        {"broken_zstd", &zstd, 0, 16, false},
        {"unrepaired", &plain, 0, 0, true},
        {"unrepaired_damaged", &plain, 0, 1, true},
    };
    bool ok = true;
    for (size_t i = 0; i < sizeof seeds / sizeof seeds[0]; i++) {
        tiny_build(&file, seeds[i].options);
        const uint64_t layer_off = qsf_load_u64(repair_unit(file.bytes, file.n_bytes, 1));
        memset(file.bytes + layer_off + 20, 0xEE, seeds[i].broken);
        if (seeds[i].is_raw)
            memcpy(file.bytes, "qsf1", 4);
        const size_t n_bytes = seeds[i].n_bytes != 0 ? seeds[i].n_bytes : file.n_bytes;
        ok = write_seed(folder, seeds[i].name, n_bytes) && ok;
    }
    tiny_model_build(&file, &(tiny_model){.n_layers = 1,
                                          .dtype = QSF_DTYPE_4BIT,
                                          .compression = QSF_COMPRESSION_LZ4,
                                          .has_outliers = true});
    return write_seed(folder, "outliers_lz4", file.n_bytes) && ok;
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
