/* terminal.h - what the system does to a program's arguments, streams and Ctrl-C. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* First of all: from then on arguments, names of files and standard streams are UTF-8, byte for
 * byte. */
void terminal_begin(int *argc, char ***argv);

/* From now on Ctrl-C calls it, and ends a read that waits. */
void terminal_on_interrupt(void (*handler)(int));
