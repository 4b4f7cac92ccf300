/* sanitized.h - IS_SANITIZED: does a sanitizer take memory and time of its own? */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_SANITIZED_H
#define QSF_TESTS_SANITIZED_H

#include "base/asan.h"

#if QSF_ASAN || defined(__SANITIZE_THREAD__)
#define IS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define IS_SANITIZED 1
#endif
#endif
#ifndef IS_SANITIZED
#define IS_SANITIZED 0
#endif

#endif
