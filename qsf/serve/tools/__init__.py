"""Tools and forms: how an answer may call functions, or what form it must have."""
# SPDX-License-Identifier: Apache-2.0
