/* crc32_tables.h - the constants of the checksum. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_CHECKSUM_CRC32_TABLES_H
#define QSF_CHECKSUM_CRC32_TABLES_H

#include <stdint.h>

#define QSF_CRC32_TABLES 16
#define QSF_CRC32_POWERS 32

extern const uint32_t qsf_crc32_tables[QSF_CRC32_TABLES][256];
extern const uint32_t qsf_crc32_powers[QSF_CRC32_POWERS];

#endif
