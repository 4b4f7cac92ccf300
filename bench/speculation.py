"""Measure what drafts gain on real text: tokens a second and a pass, for code, chat and a summary.

Each run is a process of its own; off, auto and a draft model take turns. With a budget in MB, reads
go past the page cache; --disk slows them by bench/slow_reads.c. Runs are added to a file, a JSON
record a line, so that a table can be measured in parts; the table is made of all of them, and a
text that is not the same in all runs of its prompt is an error.

Usage: python bench/speculation.py RUNS.jsonl [--model MODEL.qsf --draft SMALL.qsf --budget 300]
       [--disk MB/S] [--prompts code chat summary] [--tokens 64] [--rounds 3]
"""

# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby, islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TURN_PIECES = 1
PROMPTS = {
    "code": "Write a Python class for a binary search tree with insert, find, delete and in-order "
    "iteration, with docstrings.",
    "chat": "I sleep badly since I started a new job. What could I change in the evenings?",
    "summary": "Summarise this text in five sentences:\n\n"
    + (ROOT / "docs" / "decisions" / "001-streaming.md").read_text("utf-8")[:2000],
}


def run(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Answer one prompt with each kind of drafts; yield what each took.

    In memory the kinds take turns by a few tokens: what disturbs the machine disturbs all of them.
    """
    import qsf

    options: dict[str, Any] = {"ram_budget": "auto", "max_seq_len": 2048}
    if task["budget"] != "auto":
        options |= {"ram_budget": int(task["budget"]), "io": "direct"}
    kinds = task.pop("kinds")
    models = {k: qsf.Model(task["model"], draft=draft, **options) for k, draft in kinds.items()}
    asked = {"max_tokens": task["tokens"], "temperature": 0}
    answers = {k: model.chat(PROMPTS[task["prompt"]], **asked) for k, model in models.items()}
    while answers:
        for kind, answer in list(answers.items()):
            if len(list(islice(answer, TURN_PIECES))) < TURN_PIECES:
                del answers[kind]
    for kind, model in models.items():
        took, engine = model.stats, model.session_stats
        assert took is not None
        yield task | {
            "kind": kind,
            "tok_per_s": took.step_rate,
            "tokens_a_pass": engine.step_tokens / engine.n_step_passes,
            "ids": took.token_ids,
            "has_drafter": bool(model.info.plan.drafter_bytes),
        }


def slowed(mb_per_s: int | None, folder: str) -> dict[str, str]:
    """Return an environment in which the disk reads so many MB/s."""
    if mb_per_s is None:
        return dict(os.environ)
    library = str(Path(folder, "slow_reads.so"))
    source = str(ROOT / "bench" / "slow_reads.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return os.environ | {"LD_PRELOAD": library, "SLOW_READS_MB_S": str(mb_per_s)}


def measure(args: argparse.Namespace) -> None:
    """Add the runs to the file."""
    kinds = {"off": "off", "auto": "auto"} | ({"model": args.draft} if args.draft else {})
    with tempfile.TemporaryDirectory() as folder, args.runs.open("a") as out:
        environment = slowed(args.disk, folder)
        in_turns = [kinds] if args.budget == "auto" else [{k: kinds[k]} for k in kinds]
        for _, prompt, some in product(range(args.rounds), args.prompts, in_turns):
            task = {"model": args.model, "prompt": prompt, "kinds": some}
            task |= {"budget": args.budget, "disk": args.disk, "tokens": args.tokens}
            command = [sys.executable, __file__, "--task", json.dumps(task)]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            out.write(done.stdout.decode())
            out.flush()


def cell(runs: list[dict[str, Any]], off: list[dict[str, Any]]) -> str:
    """Return the speed with its spread, tokens a pass, and the median of the ratios to off."""
    rates = [r["tok_per_s"] for r in runs]
    if not rates:
        return "-"
    text = f"{statistics.median(rates):.3g} ({min(rates):.3g}-{max(rates):.3g})"
    if runs is off:
        return text
    ratio = statistics.median(a / b["tok_per_s"] for a, b in zip(rates, off, strict=False))
    passes = statistics.median(r["tokens_a_pass"] for r in runs)
    held = "" if runs[0]["has_drafter"] or runs[0]["kind"] == "auto" else ", no room"
    return f"{text}, {passes:.2f}, **{ratio:.2f}x**{held}"


def table(runs: list[dict[str, Any]]) -> str:
    """Return Markdown. Raises SystemExit: texts differ."""
    for prompt in PROMPTS:
        texts = [r["ids"] for r in runs if r["prompt"] == prompt]
        longest: list[int] = max(texts, key=len, default=[])
        if any(ids != longest[: len(ids)] for ids in texts):
            raise SystemExit(f"the texts of {prompt!r} differ")
    lines = ["| budget, disk | text | off | auto | draft model |", "|---" * 5 + "|"]

    def key(r: dict[str, Any]) -> tuple[str, int, str]:
        return r["budget"], r["disk"] or 0, r["prompt"]

    for (budget, disk, prompt), group in groupby(sorted(runs, key=key), key):
        found = list(group)
        kinds = [[r for r in found if r["kind"] == kind] for kind in ("off", "auto", "model")]
        speed = f"{disk} MB/s" if disk else "as it is"
        where = "in memory" if budget == "auto" else f"{budget} MB, {speed}"
        cells = [cell(kind, kinds[0]) for kind in kinds]
        lines.append(f"| {where} | {prompt} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, then print the table of all runs in the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="?", metavar="RUNS.jsonl")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--model", metavar="MODEL.qsf")
    parser.add_argument("--draft", metavar="SMALL.qsf")
    parser.add_argument("--budget", default="auto", metavar="MB|auto")
    parser.add_argument("--disk", type=int, metavar="MB/S")
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.task:
        for record in run(args.task):
            print(json.dumps(record))
        return
    if args.model:
        measure(args)
    print(table([json.loads(line) for line in args.runs.read_text("utf-8").splitlines()]))


if __name__ == "__main__":
    main()
