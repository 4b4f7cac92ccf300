"""The options of the program without Python are those of ``qsf run``: names, letters, ranges."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from pathlib import Path

from qsf.cli.run.options import RunOptions
from qsf.native._qsf import lib
from qsf.options import GenerationOptions, ModelOptions, Number, Whole, described

SOURCE = Path(__file__).parents[3] / "program" / "arguments.c"
ROW = re.compile(r"\{\"([\w-]+)\", (?:0|'(\w)'), (\w+), .+?, ([-\w.]+), ([-\w.]+), \"\w+\"\},")
NUMBERS = {"MOST_U32": 2**32 - 1, "QSF_MAX_DRAFT_ROWS": lib.QSF_MAX_DRAFT_ROWS}


def test_its_options_are_those_of_qsf_run() -> None:
    rows = {row[0]: row[1:] for row in ROW.findall(SOURCE.read_text("ascii"))}
    names = {"plan"} | {o.flag[2:] for o in described(RunOptions)}
    for option in (*described(ModelOptions, "run"), *described(GenerationOptions, "run")):
        is_lacking = option.name in ("kv_policy", "template_args", "lora")
        longer = [option.flag, *(name for name in option.also if name.startswith("--"))]
        short = "".join(name[1:] for name in option.also if name not in longer)
        for name in () if is_lacking else longer:
            letter, kind, *range_ = rows[name[2:]]
            assert letter == (short if name == option.flag else ""), name
            if kind in ("COUNT", "REAL", "WHOLE"):
                assert isinstance(option.kind, Whole | Number), name
                first = option.kind.least or 1e-9 * getattr(option.kind, "is_open", False)
                assert [float(NUMBERS.get(n, n)) for n in range_] == [first, option.kind.most]
        names |= {name[2:] for name in longer}
    assert rows.keys() <= names
