/* stop.c - how the program ends. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "stop.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "terminal.h"

static qsf_session *running;
static volatile sig_atomic_t is_interrupted;

static void interrupt(int number)
{
    signal(number, SIG_DFL);
    is_interrupted = 1;
    qsf_session_cancel(running);
}

void stop_on_interrupt(qsf_session *session)
{
    running = session;
    terminal_on_interrupt(interrupt);
}

bool was_interrupted(void)
{
    return is_interrupted != 0;
}

void fail(const char *what)
{
    fflush(stdout);
    fprintf(stderr, "qsf: %s\n", what);
    exit(1);
}

void check(qsf_status status)
{
    if (status == QSF_OK)
        return;
    if (status == QSF_ERR_CANCELLED && was_interrupted()) {
        puts("");
        exit(130);
    }
    fail(qsf_error_detail());
}
