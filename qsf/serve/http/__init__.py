"""HTTP: connections, access rules, the fields of a body, errors as answers."""
# SPDX-License-Identifier: Apache-2.0
