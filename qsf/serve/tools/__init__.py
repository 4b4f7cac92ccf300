"""Tools: calls of functions in answers, and constraints on the form of answers."""
# SPDX-License-Identifier: Apache-2.0
