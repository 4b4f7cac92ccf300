"""``python -m qsf.bench``: QSF compared with the machine's limits and with llama.cpp.

==========  =====================================================================================
`cli`       the command; with `options`, the command line, the only module here that prints
`request`   the options, checked, with their defaults
`campaign`  a run, from its request to its results
`models/`   files to measure: `shapes` of well-known models, `random_qsf` and `random_gguf` write
            random weights, `cache` keeps them, `facts` are the bytes and multiply-adds of a token
`run/`      measured processes: `tasks` and answers, `worker_qsf`, `worker_llama`
            do them, `launch` starts them, `memory_group` limits them, `rounds` has them take turns,
            `baseline` finds llama.cpp
`judge/`    from times to `results`: the `machine`, `bounds` of a test, `rows` and ratios; the
            machine's limits are `qsf.native.roofline`'s
`show/`     `report`: its parts, which `table` shows on a terminal or as HTML
==========  =====================================================================================

Packages import downwards only: the modules here, then show, judge, run, models. Nothing else
imports any of it: `qsf.bench` is only its name.
"""
# SPDX-License-Identifier: Apache-2.0
