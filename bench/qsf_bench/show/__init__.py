"""Results for people: the terminal's tables, the web page, the trace."""
# SPDX-License-Identifier: Apache-2.0
