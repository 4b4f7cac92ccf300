"""``python -m qsf.bench``: QSF held against the machine's limits and llama.cpp.

=================  ================================================================================
`cli`, `request`   the command line, the only module here that prints; its options, checked
`campaign`         a run from its options to its results
`shapes`           dimensions of well-known models
`random_qsf`       a .qsf file of a shape with random weights
`random_gguf`      the same as GGUF, with the types llama.cpp's quantiser would choose
`model_cache`      these files, made once
`file_facts`       what a token costs by the file alone: weights, bytes, multiply-adds
`tasks`            what a measured process is told, and what it answers
`worker_qsf`       the measured process, QSF
`worker_llama`     the measured process, llama.cpp; runs in a Python that need not have QSF
`launch`           starts processes, with a real limit on memory if asked for (`memory_group`)
`peer`             where llama.cpp is, and what to do where it is not
`rounds`           who runs when: A B A B
`machine`          what the machine is; `limits`: what it can do at most
`analysis`         from answers to rows: spreads, fractions of the limits, ratios, breakdowns
`results`          the rows, and their JSON
`compare`          two results, and what the machine has to do with their differences
`noise`            whether a figure of a few rounds has changed
`mixture`          parts of a token beside each other, where the machine cancels out
`quality`          perplexity and KL of the files, where a text is given
`table`            the terminal's report
`page*`, `plots`   the HTML report
`trace`            Chrome's trace events
=================  ================================================================================
"""
# SPDX-License-Identifier: Apache-2.0
