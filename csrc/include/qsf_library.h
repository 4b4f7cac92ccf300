/* qsf_library.h - part of qsf.h: status, errors, version, the machine. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_LIBRARY_H
#define QSF_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define QSF_API
#elif defined(__GNUC__)
#define QSF_API __attribute__((visibility("default")))
#else
#define QSF_API
#endif

/* Around what the parts of qsf.h declare */
#ifdef __cplusplus
#define QSF_C_BEGIN extern "C" {
#define QSF_C_END }
#else
#define QSF_C_BEGIN
#define QSF_C_END
#endif

QSF_C_BEGIN

/* ---- cdef begin ---- (cffi reads this part too, so it has declarations and integer
 * #defines only: no #if, no inline functions) */

#define QSF_API_VERSION 2

typedef enum qsf_status {
    QSF_OK = 0,
    QSF_ERR_ARG = -1,         /* the caller broke a documented rule */
    QSF_ERR_NOMEM = -2,       /* the request needs more memory than the budget allows */
    QSF_ERR_IO = -3,          /* the operating system reported an error when opening or reading */
    QSF_ERR_FORMAT = -4,      /* not a QSF file, or one that breaks a rule of the format */
    QSF_ERR_UNSUPPORTED = -5, /* the file is valid, but this build cannot read it */
    QSF_ERR_CANCELLED = -6,   /* qsf_session_cancel() was called */
    QSF_ERR_NUMERIC = -7,     /* the model produced NaN or infinity */
    QSF_ERR_DAMAGED = -8      /* bytes of the file have changed since it was written: a checksum is
                               * wrong, or the file is truncated */
} qsf_status;

typedef struct qsf_model qsf_model;
typedef struct qsf_session qsf_session;

/* ---- library ---- */

/* Returns the version of the library, such as "0.1.0": a static string, never NULL. */
QSF_API const char *qsf_version(void);

/* Returns the name of a status, such as "QSF_ERR_FORMAT": a static string, never NULL. */
QSF_API const char *qsf_status_name(qsf_status status);

/* Returns a text for people that explains the last error of this thread. It is never NULL and
 * stays valid until this thread calls QSF again. */
QSF_API const char *qsf_error_detail(void);

/* The instruction sets, processors and memory of this machine. */
typedef struct qsf_machine {
    char isa_name[16];        /* kernels that will be used, such as "avx2" */
    char isa_available[64];   /* names that QSF_ISA accepts here, separated by spaces */
    uint32_t n_cores;         /* physical cores that this process may use */
    uint64_t memory_bytes;    /* total, or the control group's limit if that is lower */
    uint64_t available_bytes; /* memory that the system says is available */
    uint64_t resident_bytes;  /* resident memory of this process now */
    uint64_t peak_bytes;      /* highest resident memory of this process so far */
} qsf_machine;

/* Describes this machine. Returns QSF_ERR_ARG if the environment variable QSF_ISA names an
 * instruction set that does not exist or that this machine lacks. */
QSF_API qsf_status qsf_machine_describe(qsf_machine *out);

/* Measures the bytes a second that n_threads (1 .. 256; the caller's is one) read from memory
 * together: the best of many passes in about n_ms (1 .. 60000). n_bytes of memory are taken for it,
 * in huge pages if the system has some: at least 64 MiB and 1 MiB a thread, and several times the
 * last cache for a meaningful result; each thread reads its own part. QSF_ERR_NOMEM if the system
 * has less. Other work at the same time lowers the result. */
QSF_API qsf_status qsf_machine_roofline(uint32_t n_threads, uint64_t n_bytes, uint32_t n_ms,
                                        double *read_bytes_per_s);

/* ---- cdef end ---- */

QSF_C_END

#endif
