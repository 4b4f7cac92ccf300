/* procfile.c - reads and parses the text files of /proc and /sys. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/linux/procfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns the number of bytes read; 0 at the end or on an error. */
static size_t read_some(int fd, char *to, size_t cap_bytes)
{
    ssize_t got;
    do {
        got = read(fd, to, cap_bytes);
    } while (got < 0 && errno == EINTR);
    return got > 0 ? (size_t)got : 0;
}

bool qsf_procfile_read(const char *path, char *text, size_t cap_bytes)
{
    text[0] = '\0';
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    size_t n_bytes = 0;
    for (size_t got = 1; got > 0 && n_bytes < cap_bytes - 1; n_bytes += got)
        got = read_some(fd, text + n_bytes, cap_bytes - 1 - n_bytes);
    text[n_bytes] = '\0';
    close(fd);
    return n_bytes > 0;
}

/* Passes the complete lines of text [*n_bytes] to `wants` and moves the rest to its front. */
static bool give_lines(char *text, size_t *n_bytes, qsf_procfile_line_fn *wants, void *arg)
{
    char *line = text;
    bool is_found = false;
    for (char *end = strchr(line, '\n'); !is_found && end != NULL; end = strchr(line, '\n')) {
        *end = '\0';
        is_found = wants(arg, line);
        line = end + 1;
    }
    *n_bytes -= (size_t)(line - text);
    memmove(text, line, *n_bytes + 1);
    return is_found;
}

bool qsf_procfile_find_line(const char *path, qsf_procfile_line_fn *wants, void *arg)
{
    char text[QSF_PROCFILE_LINE_BYTES];
    size_t n_bytes = 0;
    bool is_found = false;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    while (!is_found) {
        const size_t got = read_some(fd, text + n_bytes, sizeof text - 1 - n_bytes);
        if (got == 0)
            break;
        n_bytes += got;
        text[n_bytes] = '\0';
        is_found = give_lines(text, &n_bytes, wants, arg);
        if (!is_found && n_bytes == sizeof text - 1) {
            is_found = wants(arg, text);
            n_bytes = 0;
        }
    }
    close(fd);
    return is_found || (n_bytes > 0 && wants(arg, text));
}

/* strtoull alone would accept "-1" as a huge number. */
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
