/* terminal_win32.c - Windows: a code page for arguments and the console, and line ends. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <fcntl.h>
#include <io.h>
#include <locale.h>
#include <signal.h>
#include <stdlib.h>
#include <windows.h>

/* After windows.h. */
#include <shellapi.h>

static UINT input_page, output_page;

static void restore(void)
{
    SetConsoleCP(input_page);
    SetConsoleOutputCP(output_page);
}

static void take_arguments(int *argc, char ***argv)
{
    int n = 0;
    wchar_t **const wide = CommandLineToArgvW(GetCommandLineW(), &n);
    char **const utf8 = wide != NULL ? calloc((size_t)n + 1, sizeof *utf8) : NULL;
    if (utf8 == NULL)
        return;
    for (int i = 0; i < n; i++) {
        const int n_bytes = WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, NULL, 0, NULL, NULL);
        utf8[i] = malloc((size_t)n_bytes);
        if (utf8[i] == NULL)
            return;
        WideCharToMultiByte(CP_UTF8, 0, wide[i], -1, utf8[i], n_bytes, NULL, NULL);
    }
    *argc = n;
    *argv = utf8;
}

void terminal_begin(int *argc, char ***argv)
{
    setlocale(LC_CTYPE, ".UTF8"); /* for fopen */
    for (int fd = 0; fd < 3; fd++)
        _setmode(fd, _O_BINARY);
    input_page = GetConsoleCP();
    output_page = GetConsoleOutputCP();
    if (output_page != 0 && SetConsoleCP(CP_UTF8) && SetConsoleOutputCP(CP_UTF8))
        atexit(restore);
    take_arguments(argc, argv);
}

void terminal_on_interrupt(void (*handler)(int))
{
    signal(SIGINT, handler);
}
