/* io_cached.h - does the page cache hold a file? */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_IO_IO_CACHED_H
#define QSF_IO_IO_CACHED_H

#include <stdbool.h>

#include "platform/file.h"

/* Looks at pages spread over the file; true: it holds most of them. False where the system
 * does not tell. Brings next to nothing into the cache. */
bool qsf_io_is_cached(const qsf_file *file);

#endif
