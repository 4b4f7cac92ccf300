/* io_cached.h - whether the page cache holds a file. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

#include "platform/file.h"

/* Samples pages all over the file. True if the page cache holds more than half of them; false if
 * the system cannot report it. Hardly changes the cache. */
bool qsf_io_is_cached(const qsf_file *file);
