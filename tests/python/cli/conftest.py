"""Fixtures of all tests of commands."""
# SPDX-License-Identifier: Apache-2.0

from make.commands import run as run
from make.commands import start as start
from make.terminals import on_terminal as on_terminal
