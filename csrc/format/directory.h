/* directory.h - the section directory: the offsets of sections. */
/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "format/header.h"
#include "format/records.h"

/* Reads the directory into r->sections. The caller has checked the header. */
qsf_status qsf_directory_read(qsf_reader *r, const qsf_header_links *links);
