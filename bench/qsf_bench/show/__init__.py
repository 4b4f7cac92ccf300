"""Results for people: the terminal's tables and the web page."""
# SPDX-License-Identifier: Apache-2.0
