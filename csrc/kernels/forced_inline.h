/* forced_inline.h - QSF_FORCED_INLINE: a function whose constant arguments must reach its body.
 *
 * Kernels are written once with a count as an argument (tokens, tile rows) and called
 * with literals; only after inlining do the arrays indexed by that count become registers.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_KERNELS_FORCED_INLINE_H
#define QSF_KERNELS_FORCED_INLINE_H

#if defined(__GNUC__)
#define QSF_FORCED_INLINE static inline __attribute__((always_inline))
#else
#define QSF_FORCED_INLINE static inline
#endif

#endif
