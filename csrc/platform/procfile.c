/* procfile.c - reads and picks apart the text files of /proc and /sys. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/procfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool qsf_procfile_read(const char *path, char *text, size_t cap_bytes)
{
    text[0] = '\0';
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    size_t n_bytes = 0;
    while (n_bytes < cap_bytes - 1) {
        const ssize_t got = read(fd, text + n_bytes, cap_bytes - 1 - n_bytes);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        n_bytes += (size_t)got;
    }
    text[n_bytes] = '\0';
    close(fd);
    return n_bytes > 0;
}

/* strtoull alone would take a sign and turn it into a huge number. */
static bool parse_number(const char *text, uint64_t *out)
{
    text += strspn(text, " \t");
    if (*text < '0' || *text > '9')
        return false;
    *out = strtoull(text, NULL, 10);
    return true;
}

bool qsf_procfile_field(const char *text, const char *key, uint64_t *out)
{
    const size_t key_bytes = strlen(key);
    for (const char *line = text; line != NULL && *line != '\0';) {
        if (strncmp(line, key, key_bytes) == 0)
            return parse_number(line + key_bytes, out);
        const char *const end = strchr(line, '\n');
        line = end != NULL ? end + 1 : NULL;
    }
    return false;
}

bool qsf_procfile_number(const char *path, uint64_t *out)
{
    char text[64];
    return qsf_procfile_read(path, text, sizeof text) && parse_number(text, out);
}
