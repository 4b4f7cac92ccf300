/* count_open.h - how many of the first descriptors are open: what is leaked is one more. */
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef QSF_TESTS_COUNT_OPEN_H
#define QSF_TESTS_COUNT_OPEN_H

#include <fcntl.h>

static inline int count_open(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

#endif
