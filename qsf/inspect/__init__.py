"""qsf-inspect: shows the contents of a file."""
# SPDX-License-Identifier: Apache-2.0
