"""The quality report of a file: its record in META, as text and as a page."""
# SPDX-License-Identifier: Apache-2.0
