"""``python -m qsf.bench``: QSF held against the machine's limits and llama.cpp.

==========  =====================================================================================
`cli`       the command; with `options`, the command line, the only module here that prints
`request`   the options, checked, with their defaults
`load`      ``python -m qsf.bench serve URL``: many requests to a server
`campaign`  a run, from its request to its results
`models/`   files to measure: `shapes` of well-known models, `random_qsf` and `random_gguf` write
            random weights, `cache` keeps them, `facts` are the bytes and multiply-adds of a token
`run/`      measured processes: `tasks` and answers, `worker_qsf`, `worker_llama` and `llama_bench`
            do them, `launch` starts them, `memory_group` limits them, `rounds` has them take turns,
            `baseline` finds llama.cpp
`judge/`    from times to `results`: `machine` and its `limits`, `bounds` of a test, `rows` and
            ratios, `compare` with an earlier result
`show/`     `report`: its parts, which `table` shows on a terminal and `page`, with `plots`, as
            HTML; `trace` for Chrome
==========  =====================================================================================

Packages import downwards only: the modules here, then show, judge, run, models.
"""
# SPDX-License-Identifier: Apache-2.0
