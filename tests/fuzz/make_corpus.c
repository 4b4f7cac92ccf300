/* make_corpus.c - writes the seed files of fuzz_reader: whole ones of every kind, broken ones.
 *
 * Usage: make_corpus tests/fuzz/corpus/reader
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "tiny_file.h"

static tiny_file file;

static bool write_seed(const char *folder, const char *name, size_t n_bytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return tiny_write(path, file.bytes, n_bytes);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        tiny_options options;
    } whole[] = {
        {"plain", {{0, 0}, false, false}},
        {"tied_lz4", {{QSF_COMPRESSION_LZ4, QSF_COMPRESSION_LZ4HC}, true, false}},
        {"learned_zstd", {{QSF_COMPRESSION_ZSTD, QSF_COMPRESSION_NONE}, false, true}},
    };
    if (argc != 2) {
        fprintf(stderr, "usage: make_corpus FOLDER\n");
        return 2;
    }
    bool ok = true;
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++) {
        tiny_build(&file, &whole[i].options);
        ok = write_seed(argv[1], whole[i].name, file.n_bytes) && ok;
    }
    /* Broken: cut off, damaged inside a compressed block, damaged with its checksums unrepaired. */
    ok = write_seed(argv[1], "cut_in_tables", 300) && ok;
    ok = write_seed(argv[1], "cut_in_layer", 9000) && ok;
    tiny_build(&file, &whole[1].options);
    const unsigned char *const layr = repair_find(file.bytes, file.n_bytes, "LAYR");
    const uint64_t layer_off = qsf_load_u64(file.bytes + qsf_load_u64(layr + 8));
    memset(file.bytes + layer_off + 20, 0xEE, 16);
    ok = write_seed(argv[1], "broken_lz4", file.n_bytes) && ok;
    tiny_build(&file, &whole[2].options);
    memset(file.bytes + layer_off + 20, 0xEE, 16);
    ok = write_seed(argv[1], "broken_zstd", file.n_bytes) && ok;
    tiny_build(&file, &whole[0].options);
    memcpy(file.bytes, "qsf1", 4);
    ok = write_seed(argv[1], "unrepaired", file.n_bytes) && ok;
    file.bytes[layer_off + 100] ^= 1;
    ok = write_seed(argv[1], "unrepaired_damaged", file.n_bytes) && ok;
    return ok ? 0 : 1;
}
