/* replay.c - every file of a corpus folder through a fuzz target, without a fuzzer.
 *
 * Usage: replay FOLDER. Fails when the folder has no files; the target aborts on a finding.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_INPUT_BYTES (1U << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* In a block of exactly its size, so that a sanitizer sees one byte read too many. */
static int replay_file(const char *path)
{
    static uint8_t bytes[MAX_INPUT_BYTES];
    FILE *const in = fopen(path, "rb");
    if (in == NULL) {
        perror(path);
        return 1;
    }
    const size_t n_bytes = fread(bytes, 1, sizeof bytes, in);
    fclose(in);
    uint8_t *const exact = malloc(n_bytes + !n_bytes);
    if (exact == NULL)
        return 1;
    memcpy(exact, bytes, n_bytes);
    LLVMFuzzerTestOneInput(exact, n_bytes);
    free(exact);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: replay FOLDER\n");
        return 2;
    }
    DIR *const folder = opendir(argv[1]);
    if (folder == NULL) {
        perror(argv[1]);
        return 2;
    }
    int n_replayed = 0;
    int n_failed = 0;
    for (const struct dirent *e = readdir(folder); e != NULL; e = readdir(folder)) {
        char path[4096];
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", argv[1], e->d_name);
        n_failed += replay_file(path);
        n_replayed++;
    }
    closedir(folder);
    printf("replay: %d files, %d failed\n", n_replayed, n_failed);
    return n_failed != 0 || n_replayed == 0;
}
