/* crc32_tables.h - the powers that combining checksums multiplies by. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#define QSF_CRC32_POWERS 32

extern const uint32_t qsf_crc32_powers[QSF_CRC32_POWERS];
