"""What all commands share: start, exit codes, progress, output files."""
# SPDX-License-Identifier: Apache-2.0
