/* psi.c - parses the line "full avg10=1.23 avg60=..." of Linux. */
/* SPDX-License-Identifier: Apache-2.0 */
#include "platform/psi.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "platform/linux/cgroup_path.h"
#include "platform/linux/procfile.h"

#define PATH_BYTES 2048

static const char key[] = "full avg10=";

/* Not strtod, which uses the locale's decimal point. */
static double parse_percent(const char *at)
{
    double percent = 0.0;
    for (; *at >= '0' && *at <= '9'; at++)
        percent = percent * 10.0 + (*at - '0');
    double place = 0.1;
    if (*at == '.')
        for (at++; *at >= '0' && *at <= '9'; at++, place /= 10.0)
            percent += place * (*at - '0');
    return percent;
}

static bool read_percent(const char *path, double *out)
{
    char text[256];
    if (!qsf_procfile_read(path, text, sizeof text))
        return false;
    const char *const line = strstr(text, key);
    if (line == NULL)
        return false;
    *out = parse_percent(line + sizeof key - 1);
    return true;
}

double qsf_psi_memory_percent(const char *root)
{
    char path[PATH_BYTES];
    double percent = 0.0;
    if (qsf_cgroup_path("memory.pressure", root, path, sizeof path) && read_percent(path, &percent))
        return percent;
    const int n_bytes = snprintf(path, sizeof path, "%s/proc/pressure/memory", root);
    if (n_bytes >= 0 && (size_t)n_bytes < sizeof path)
        (void)read_percent(path, &percent);
    return percent;
}
