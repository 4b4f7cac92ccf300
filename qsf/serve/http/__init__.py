"""HTTP: connections, who may ask, the fields of a body, problems as answers."""
# SPDX-License-Identifier: Apache-2.0
