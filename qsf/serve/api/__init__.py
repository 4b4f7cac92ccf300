"""The APIs in which clients ask: their fields, and the form of their answers."""
# SPDX-License-Identifier: Apache-2.0
