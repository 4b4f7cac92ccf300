/* system_error.h - the text of an error of Windows, in English. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_PLATFORM_WIN32_SYSTEM_ERROR_H
#define QSF_PLATFORM_WIN32_SYSTEM_ERROR_H

#define QSF_SYSTEM_ERROR_BYTES 160

/* Writes what GetLastError() meant, without the line end of the system's text, and its number. */
void qsf_system_error_text(unsigned long code, char text[QSF_SYSTEM_ERROR_BYTES]);

#endif
