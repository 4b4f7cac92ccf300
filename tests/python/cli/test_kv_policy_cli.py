"""``--kv-policy`` as a user types it: answers, chats and measurements that outgrow their memory."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qsf
from make.commands import Run, check_refused
from qsf.cli import evaluate as eval_cli
from qsf.evaluate.evaluation import ShortenedLogits
from qsf.evaluate.windows import cut_windows
from qsf.kv import KvPolicy

PROMPT = "Once upon a time"
GREEDY = ("--temperature", 0)


def test_an_answer_goes_on_behind_the_context(run: Run, tiny_llama_8bit: Path) -> None:
    asked = ("-p", PROMPT, "--raw", *GREEDY, "-n", 200, "--max-seq-len", 64, "--json")
    done = run(tiny_llama_8bit, *asked[:-1])
    assert "--kv-policy goes on" in done.stderr
    done = run(tiny_llama_8bit, *asked[:-1], "--kv-policy", "recompute:8")
    assert "its middle forgotten" in done.stderr
    assert "is full;" not in done.stderr
    done = run(tiny_llama_8bit, "-p", PROMPT, "--kv-policy", "window:500")
    check_refused(done, 1, "the context has only 512")
    cut = json.loads(run(tiny_llama_8bit, *asked).stdout)
    assert cut["stop_reason"] == "context"
    for policy in ("recompute:8", "window:32:8"):
        done = json.loads(run(tiny_llama_8bit, *asked, "--kv-policy", policy).stdout)
        assert done["generated_tokens"] > cut["generated_tokens"]
        assert len(done["ids"]) >= done["generated_tokens"] - 1
        if policy.startswith("recompute"):
            assert done["text"].startswith(cut["text"])


def test_chats_forget_and_say_so(run: Run, tiny_llama_8bit: Path, tiny_chat_8bit: Path) -> None:
    lines = "".join(f"Tom saw ball {i}.\n" for i in range(9))
    asked = ("--interactive", "--max-seq-len", 96, *GREEDY, "-n", 8)
    done = run(tiny_llama_8bit, *asked, "--kv-policy", "recompute:4", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "turns are forgotten" in done.stderr
    assert "turn is forgotten" in run(tiny_llama_8bit, *asked, stdin=lines).stderr
    told = ("-p", "Hi", "-n", 1, "--kv-policy", "window:64:40", "--system")
    long = "Be kind and brief. " * 12
    assert "keeps only the first 40" in run(tiny_chat_8bit, *told, long).stderr
    assert "keeps only" not in run(tiny_chat_8bit, *told, "Be kind.").stderr


# ---- measuring ----


def test_eval_compares_with_the_same_file(tiny_llama_8bit: Path, tmp_path: Path) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("Tom saw a red ball. Lily had a little dog and a big hat. " * 20, "utf-8")
    for policy, first_worse in (("window:32:4", 36), ("recompute:4", 64)):
        asked = [tiny_llama_8bit, "--text", text, "--ctx", 128, "--kv-policy", policy]
        asked += ["--ram-budget", 0, "--threads", 1, "--quiet", "--json", figures]
        assert eval_cli.run([*map(str, asked)]) == 0
        found: dict[str, Any] = json.loads(figures.read_text("utf-8"))
        assert found["kv_policy"] == policy
        assert found["against"] == str(tiny_llama_8bit)
        for place in found["places"]:
            is_whole = place["position"] + 8 <= first_worse
            assert (place["kl_mean"] == 0) == is_whole, place


def test_shortened_logits_are_those_of_what_is_left(tiny_llama_8bit: Path) -> None:
    policy, tokens = KvPolicy("recompute:4", 0, 4), np.arange(100, 180)
    with qsf.Model(tiny_llama_8bit, ram_budget=None, max_seq_len=32) as model:
        source = ShortenedLogits(model, policy, 80)
        blocks = source.logits(cut_windows(tokens, "windows", 80), 30, lambda _: None)
        have = np.concatenate([block.copy() for block in blocks])
        held: list[int] = []
        for i, token in enumerate(tokens[:-1].tolist()):
            held.append(token)
            if len(held) > 32:
                held = held[:4] + held[-14:]
            assert np.array_equal(have[i], model.logits(held, first_row=len(held) - 1)[0])


# ---- keys and values in a file ----


def test_the_plan_and_the_end_say_what_a_file_costs(
    run: Run, tiny_llama_8bit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked = ("--ram-budget", 0, "--max-seq-len", 512, "--kv-policy", "disk:32")
    plan = run(tiny_llama_8bit, "--plan", *asked)
    assert "KV cache, 32 of 512 tokens, 8bit, disk:32" in plan.stdout
    assert "and keys and values, at most" in plan.stdout
    prompt = ("-p", "Tom saw a red ball. " * 55, "--raw", *GREEDY, "-n", 40, "--verbose")
    done = run(tiny_llama_8bit, *asked, *prompt)
    if "lies in memory" in done.stderr:
        pytest.skip(done.stderr)
    whole = run(tiny_llama_8bit, *asked[:4], *prompt)
    assert done.stdout == whole.stdout
    assert "MB written to a file and" in done.stderr
    assert "written to a file" not in whole.stderr
