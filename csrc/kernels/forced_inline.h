/* forced_inline.h - QSF_FORCED_INLINE: a function whose constant arguments must reach its body,
 * QSF_NOT_INLINED: one whose copies would cost more than its calls, and QSF_UNROLLED: a loop of up
 * to 16 turns that must become a sequence, as gcc makes it.
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

#if defined(__clang__) /* else it unrolls after it has put sums [n_tokens] on the stack */
#define QSF_UNROLLED _Pragma("GCC unroll 16")
#else
#define QSF_UNROLLED
#endif
