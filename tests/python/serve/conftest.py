"""Fixtures of all tests of the server."""
# SPDX-License-Identifier: Apache-2.0

from make.rendering import rendered_here as rendered_here
