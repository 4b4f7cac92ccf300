"""Which sequences run in the next pass: jobs, slots, their files and costs."""
# SPDX-License-Identifier: Apache-2.0
