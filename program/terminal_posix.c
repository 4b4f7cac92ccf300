/* terminal_posix.c - POSIX systems leave bytes alone. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "program.h"

#include <signal.h>

void terminal_begin(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
}

void terminal_on_interrupt(void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler}; /* not SA_RESTART: it ends a read, too */
    sigaction(SIGINT, &action, NULL);
}
