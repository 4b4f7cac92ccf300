"""Fixtures of all tests of commands."""
# SPDX-License-Identifier: Apache-2.0

from make.rendering import rendered_here as rendered_here
from make.terminals import on_terminal as on_terminal
