"""Tools and forms: calls of functions in answers, and constraints on their form."""
# SPDX-License-Identifier: Apache-2.0
