/* forced_inline.h - QSF_FORCED_INLINE: a function whose constant arguments must reach its body,
 * QSF_NOT_INLINED: one whose copies would cost more than its calls, QSF_UNROLL(n): a loop whose n
 * turns must become a sequence, and QSF_UNROLLED: one of up to 16, which gcc makes so by itself.
 *
 * Kernels have counts (tokens, tile rows) as arguments and are called with literals. Only after
 * inlining, arrays indexed by such a count become registers.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Without optimisation and under AddressSanitizer nothing makes copies shorter: a kernel's take ten
 * times as long to compile, and 250 KB of stack. */
#if !defined(__OPTIMIZE__) || defined(__SANITIZE_ADDRESS__)
#define QSF_FORCED_INLINE static inline
#else
#define QSF_FORCED_INLINE static inline __attribute__((always_inline))
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define QSF_UNROLL(n) /* gcc needs twice as long for the sequence */
#else
#define QSF_UNROLL_TEXT(text) _Pragma(#text)
#define QSF_UNROLL(n) QSF_UNROLL_TEXT(GCC unroll n)
#endif
#define QSF_NOT_INLINED __attribute__((noinline))

#if defined(__clang__) /* else it unrolls after it has put sums [n_tokens] on the stack */
#define QSF_UNROLLED _Pragma("GCC unroll 16")
#else
#define QSF_UNROLLED
#endif
