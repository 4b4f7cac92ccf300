"""``python -m qsf.bench``: QSF and llama.cpp in turns, on the same files and threads.

================  ==========================================================================
`cli`             the command: options, files, rounds, report; the only module that prints
`tasks`           one measured process: its task, its answer, and the turns of several
`worker_qsf`      the measured process of QSF
`worker_llama`    the measured process of llama.cpp
`processes`       starts a process, limits its memory, and returns its exit and output
`memory_group`    a memory control group
`files`           files to measure: bytes of a token; random weights, kept in a cache
`models/`         `shapes` of well-known models; `random_qsf` and `random_gguf` write weights
`table`           the report: text, JSON and a web page
================  ==========================================================================

Nothing else imports any of it: `qsf.bench` is only its name.
"""
# SPDX-License-Identifier: Apache-2.0
