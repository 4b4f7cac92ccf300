/* system.h - what the C tests need of the operating system: aligned memory, names of files, the
 * environment. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_SYSTEM_H
#define QSF_TESTS_SYSTEM_H

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(_WIN32)

#include <malloc.h>

#define O_CLOEXEC O_BINARY

static inline void *check_alloc(size_t align, size_t n_bytes)
{
    return _aligned_malloc(n_bytes, align);
}

static inline void check_free(void *p)
{
    _aligned_free(p);
}

static inline int unsetenv(const char *name)
{
    return _putenv_s(name, "");
}

static inline int setenv(const char *name, const char *value, int overwrite)
{
    (void)overwrite;
    return _putenv_s(name, value);
}

#else

static inline void *check_alloc(size_t align, size_t n_bytes)
{
    return aligned_alloc(align, n_bytes);
}

static inline void check_free(void *p)
{
    free(p);
}

#endif

/* A name of this process for a file in the folder of temporary files. */
static inline void check_path(char *path, size_t cap_bytes, const char *name)
{
    const char *const folder = getenv("TEMP"); /* of Windows */
    snprintf(path, cap_bytes, "%s/%s_%ld.qsf", folder != NULL ? folder : "/tmp", name,
             (long)getpid());
}

#endif
