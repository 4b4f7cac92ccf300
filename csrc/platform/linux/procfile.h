/* procfile.h - the small text files in which Linux describes itself (/proc, /sys). */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QSF_PROCFILE_BYTES 8192 /* holds meminfo, status, memory.stat with room to spare */

/* Reads at most cap_bytes - 1 bytes from the beginning of `path` as a string. Returns false and an
 * empty string if the file is missing. cap_bytes >= 1. */
bool qsf_procfile_read(const char *path, char *text, size_t cap_bytes);

/* Passes the lines of `path`, without line ends, to `wants` until it returns true. A line longer
 * than QSF_PROCFILE_LINE_BYTES comes in pieces. Returns false if no line was wanted. Allocates
 * nothing. */
#define QSF_PROCFILE_LINE_BYTES 4096
typedef bool qsf_procfile_line_fn(void *arg, const char *line);
bool qsf_procfile_find_line(const char *path, qsf_procfile_line_fn *wants, void *arg);

/* Finds the line that begins with `key` and parses the number after it: 2048 for "MemTotal:" in
 * "MemTotal: 2048 kB". Returns false and leaves *out unchanged if there is none. */
bool qsf_procfile_field(const char *text, const char *key, uint64_t *out);

/* Parses the file as one number. Returns false if it is a word, such as "max", or negative. */
bool qsf_procfile_number(const char *path, uint64_t *out);
