/* procfile.h - the small text files in which Linux describes itself (/proc, /sys). */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_PROCFILE_H
#define QSF_PLATFORM_PROCFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QSF_PROCFILE_BYTES 8192 /* holds meminfo, status, memory.stat with room to spare */

/* Reads the beginning of `path`, at most cap_bytes - 1 bytes, as a string. False, and
 * an empty string, when there is no such file. cap_bytes >= 1. */
bool qsf_procfile_read(const char *path, char *text, size_t cap_bytes);

/* Gives the lines of `path` to `wants`, without their ends, until it says true. Allocates nothing;
 * of a line that is too long, the pieces come as lines. False when none was wanted. */
#define QSF_PROCFILE_LINE_BYTES 4096
typedef bool qsf_procfile_line_fn(void *arg, const char *line);
bool qsf_procfile_find_line(const char *path, qsf_procfile_line_fn *wants, void *arg);

/* The number that follows `key` at the start of a line ("MemTotal:" in "MemTotal:
 * 2048 kB"). False, and *out as it was, when there is none. */
bool qsf_procfile_field(const char *text, const char *key, uint64_t *out);

/* The number that the whole file consists of. False when it is a word, such as "max",
 * or negative. */
bool qsf_procfile_number(const char *path, uint64_t *out);

#endif
