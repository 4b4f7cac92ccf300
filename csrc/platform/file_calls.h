/* file_calls.h - calls that each system implements; file.c and io_way.c make complete reads and
 * writes from them. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define QSF_SYSTEM_ERROR_BYTES 160

/* One call of the system: n_bytes at `offset`, or fewer, which *done_bytes says; after a read 0 is
 * the end of the file. Calls interrupted by a signal are repeated. Any thread may call them.
 * Returns 0 or an error of the system. */
int qsf_file_read_once(intptr_t handle, uint64_t offset, void *dst, size_t n_bytes,
                       size_t *done_bytes);
int qsf_file_write_once(intptr_t handle, uint64_t offset, const void *src, size_t n_bytes,
                        size_t *done_bytes);

/* Writes the text of an error of the system. */
void qsf_system_error_text(int code, char text[QSF_SYSTEM_ERROR_BYTES]);
