"""The quality report: its record in the file, as text and as a page."""
# SPDX-License-Identifier: Apache-2.0
