"""The C engine as Python sees it: the binding and its records."""
# SPDX-License-Identifier: Apache-2.0
