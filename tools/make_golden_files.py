"""Write the small .qsf files of tests/golden, which the C tests run, and which are kept.

A later release must open these files and compute the same logits, so they are made anew only
when the version of the format changes and older files are refused.

Usage: .venv/bin/python tools/make_golden_files.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))

from make.kind_models import ROUTED, write_model  # noqa: E402
from make.tiny_checkpoints import LLAMA3_SCALING, make_gpt2, make_llama  # noqa: E402
from oracle.expert_policy import replay  # noqa: E402
from qsf.file.layout import Dtype  # noqa: E402
from qsf_converter import convert  # noqa: E402


def main() -> None:
    """Make each checkpoint from its seed and convert it."""
    golden = ROOT / "tests" / "golden"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama = make_llama(
            folder / "llama",
            seed=1,
            n_layers=3,
            max_tokens=128,
            attention_bias=True,
            rope_scaling=LLAMA3_SCALING,
        )
        gpt2 = make_gpt2(folder / "gpt2", seed=2, n_layers=3, max_tokens=128)
        convert(llama, golden / "tiny-llama-4bit.qsf", quant_type="4bit", force=True)
        convert(gpt2, golden / "tiny-gpt2-8bit.qsf", quant_type="8bit", force=True)
    write_model(golden / "tiny-experts-4bit.qsf", ROUTED[:3], dtype=Dtype.Q4, seed=6)
    (golden / "expert-trace.txt").write_text(replay(), encoding="ascii")


if __name__ == "__main__":
    main()
