/* forced_inline.h - QSF_FORCED_INLINE: a function whose constant arguments must reach its body, and
 * QSF_NOT_INLINED: one whose copies would cost more than its calls.
 *
 * Kernels have counts (tokens, tile rows) as arguments and are called with literals. Only after
 * inlining, arrays indexed by such a count become registers.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#if defined(__GNUC__)
#define QSF_FORCED_INLINE static inline __attribute__((always_inline))
#define QSF_NOT_INLINED __attribute__((noinline))
#else
#define QSF_FORCED_INLINE static inline
#define QSF_NOT_INLINED
#endif
