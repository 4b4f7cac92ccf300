"""qsf-inspect: what is in a file."""
# SPDX-License-Identifier: Apache-2.0
