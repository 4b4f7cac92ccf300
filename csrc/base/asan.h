/* asan.h - marks bytes that no code may access; does nothing without AddressSanitizer. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define QSF_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define QSF_ASAN 1
#endif
#endif
#ifndef QSF_ASAN
#define QSF_ASAN 0
#endif

#if QSF_ASAN
#include <sanitizer/asan_interface.h>
#define QSF_ASAN_POISON(p, n_bytes) __asan_poison_memory_region((p), (n_bytes))
#define QSF_ASAN_UNPOISON(p, n_bytes) __asan_unpoison_memory_region((p), (n_bytes))
#else
#define QSF_ASAN_POISON(p, n_bytes) ((void)(p), (void)(n_bytes))
#define QSF_ASAN_UNPOISON(p, n_bytes) ((void)(p), (void)(n_bytes))
#endif
