/* system_error.c - the text of an error of Windows, in English. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/file_calls.h"

#include <stdio.h>
#include <string.h>
#include <windows.h>

void qsf_system_error_text(int code, char text[QSF_SYSTEM_ERROR_BYTES])
{
    char system[QSF_SYSTEM_ERROR_BYTES - 24] = "";
    const DWORD english = MAKELANGID(LANG_ENGLISH, SUBLANG_ENGLISH_US);
    const DWORD n = FormatMessageA(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, NULL,
                                   (DWORD)code, english, system, sizeof system, NULL);
    system[n < sizeof system ? n : 0] = '\0';
    system[strcspn(system, "\r\n")] = '\0';
    (void)snprintf(text, QSF_SYSTEM_ERROR_BYTES, "%s (error %d)",
                   system[0] != '\0' ? system : "the system gives no text", code);
}
