/* bytes.h - little-endian loads and stores at any alignment.
 *
 * Only these functions turn bytes of a file into numbers. No code casts bytes to a struct.
 */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>
#include <string.h>

static inline uint16_t qsf_load_u16(const unsigned char *p)
{
    return (uint16_t)(p[0] | (unsigned)p[1] << 8);
}

static inline uint32_t qsf_load_u32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t qsf_load_u64(const unsigned char *p)
{
    return (uint64_t)qsf_load_u32(p) | (uint64_t)qsf_load_u32(p + 4) << 32;
}

static inline float qsf_load_f32(const unsigned char *p)
{
    const uint32_t bits = qsf_load_u32(p);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void qsf_store_u16(unsigned char *p, uint16_t v)
{
    p[0] = (unsigned char)(v & 0xFF);
    p[1] = (unsigned char)(v >> 8);
}

static inline void qsf_store_u32(unsigned char *p, uint32_t v)
{
    qsf_store_u16(p, (uint16_t)(v & 0xFFFF));
    qsf_store_u16(p + 2, (uint16_t)(v >> 16));
}

static inline void qsf_store_u64(unsigned char *p, uint64_t v)
{
    qsf_store_u32(p, (uint32_t)(v & 0xFFFFFFFF));
    qsf_store_u32(p + 4, (uint32_t)(v >> 32));
}

static inline void qsf_store_f32(unsigned char *p, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    qsf_store_u32(p, bits);
}
