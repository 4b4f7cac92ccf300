"""The families of models that can be converted: the names and layouts of their checkpoints, as
data.

`rules` says how tensors become tensors, `config` reads config.json, `positions` makes frequencies
of RoPE and slopes of ALiBi, `family` puts these together; the other modules are the tables.
"""
# SPDX-License-Identifier: Apache-2.0
