"""The command-line interfaces: what is typed, what is printed, exit codes; one module a command.

`qsf.shell.entry` starts them; only these modules print. Nothing else imports them.
"""
# SPDX-License-Identifier: Apache-2.0
