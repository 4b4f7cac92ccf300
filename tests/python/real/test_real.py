"""Real, trained models with all defaults: `make check-real MODELS=FOLDER`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from real.models import N_TOKENS, RealModel, check_same, count_equal, measured_text
from real.questions import CODE, QUESTIONS, TEXTS, TURNS

from make.served import started
from qsf import Model
from qsf.evaluate.evaluation import evaluate, perplexity_change

pytestmark = pytest.mark.real

N_MEASURED = 8192  # tokens of perplexity
MOST_CHANGE = 0.5  # % of perplexity that the KV cache may cost, two standard errors counted in
SHORT = QUESTIONS[:4]
CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_conversion(real: RealModel) -> None:
    assert real.conversion.returncode == 0, real.conversion.stderr
    real.run("--verify", command="inspect")


def test_ids_are_those_of_llama_cpp(real: RealModel) -> None:
    theirs = real.llama()
    with Model(real.path, ram_budget="auto", max_seq_len=512) as model:
        tokenizer = model.tokenizer
        ours = [tokenizer.encode(text, add_prefix=False) for text in TEXTS]
        prompts = [model.chat_tokens(question) for question in QUESTIONS]
    for text, ids, others in zip(TEXTS, ours, theirs["texts"], strict=True):
        assert ids == others, f"{real.name}: {text!r}\n  ours: {ids}\n  llama.cpp: {others}"
    for question, ids, chat in zip(QUESTIONS, prompts, theirs["chats"], strict=True):
        assert ids == chat["prompt"], f"{real.name}: {question}: the prompts differ"
    real.figures["ids of llama.cpp"] = f"{len(TEXTS)} of {len(TEXTS)} texts"


def test_answers_are_those_with_f16_keys_and_values(real: RealModel) -> None:
    count_equal(real, "f16 KV", real.answers(), real.answers("--kv-type", "f16"))


def test_answers_are_those_of_llama_cpp(real: RealModel) -> None:
    count_equal(real, "llama.cpp", real.answers(), [c["text"] for c in real.llama()["chats"]])


def test_perplexity_with_all_defaults(real: RealModel) -> None:
    words = ("--text", str(measured_text()), "--max-tokens", str(N_MEASURED), "--ctx", "512")
    figures = json.loads(real.run(*words, "--json", "-", "-q", command="eval"))
    cache = figures["run_cache"]
    change, error = cache["change_percent"], cache["change_error"]
    real.figures["perplexity, f16 KV"] = f"{figures['perplexity']:.3f}"
    real.figures["with defaults"] = f"{change:+.2f} % ± {error:.2f} ({cache['kv_type']})"
    assert change + 2 * error <= MOST_CHANGE, (
        f"{real.name}: perplexity {figures['perplexity']:.3f} with f16, {cache['perplexity']:.3f} "
        f"with {cache['kv_type']}: {change:+.3f} % +- {error:.3f}"
    )


def test_types_of_the_kv_cache(real: RealModel) -> None:
    """Perplexity, memory and speed by type; only the default has a bound."""
    text = measured_text().read_text("utf-8")
    found = {}
    sizes, speeds = [], []
    for kv_type in ("f16", "8bit", "k8v4", "4bit"):
        options: Any = {"ram_budget": "auto", "kv_type": kv_type, "draft": "off"}
        with Model(real.path, max_seq_len=2048, **options) as model:
            found[kv_type] = evaluate(model, text, ctx_tokens=512, max_tokens=N_MEASURED)
            sizes.append(model.info.plan.kv_bytes // 2048)
            prompt = model.tokenizer.encode(text[:20000])[:1536]
            list(model.session.generate(prompt, max_tokens=48, temperature=0))
            stats = model.session.stats
            assert stats is not None
            assert stats.generated_tokens > 16
            speeds.append(stats.step_rate)
    for kv_type, e in found.items():
        change, error = perplexity_change(e.token_nll, found["f16"].token_nll)
        real.figures[kv_type] = f"{change:+.2f} % ± {error:.2f}"
    real.figures["bytes a position: f16, 8bit, k8v4, 4bit"] = ", ".join(map(str, sizes))
    real.figures["tok/s after 1536 tokens: the same"] = ", ".join(f"{s:.1f}" for s in speeds)
    assert sizes == sorted(sizes, reverse=True)


def test_a_conversation_in_memory_in_files_and_from_its_start(
    real: RealModel, tmp_path: Path
) -> None:
    limits: Any = {"temperature": 0.0, "max_tokens": N_TOKENS}
    turns: list[Any] = []
    said: list[str] = []
    with Model(real.path, ram_budget="auto", max_seq_len=1024, sessions=2) as model:
        for turn in TURNS:
            turns.append({"role": "user", "content": turn})
            said.append("".join(model.session.chat(turn, **limits)))
            with model.create_session() as fresh:
                prompt = model.chat_tokens(turns)
                again = "".join(fresh.generate(prompt, **limits))
            check_same(
                real, {"after the turns before": [said[-1]], "from the start": [again]}, [turn]
            )
            turns.append({"role": "assistant", "content": said[-1]})
    words = ("--session", str(tmp_path / "kept.session"), "--temperature", "0", "-q")
    sizes = ("--max-tokens", str(N_TOKENS), "--max-seq-len", "1024")
    kept = [real.run("-p", turn, *words, *sizes).strip() for turn in TURNS]
    check_same(real, {"in memory": [text.strip() for text in said], "from files": kept}, TURNS)


@pytest.mark.parametrize("budget", ["200", "300"])
def test_answers_do_not_depend_on_the_budget(real: RealModel, budget: str) -> None:
    words = ("--max-seq-len", "512", "--ram-budget")
    texts = {b: real.answers(*words, b, questions=SHORT) for b in ("auto", budget)}
    check_same(real, texts, SHORT)


def test_answers_do_not_depend_on_drafts(real: RealModel) -> None:
    """Among them those of each smaller model of the folder that has the same tokenizer."""
    drafts = ["off", "auto", *(str(other.path) for other in real.smaller())]
    words = ("-p", CODE, "--temperature", "0", "--max-tokens", "64", "--ram-budget", "auto", "-q")
    check_same(real, {draft: [real.run(*words, "--draft", draft)] for draft in drafts}, [CODE])


def test_a_schema_and_a_tool_call_by_the_official_client(real: RealModel) -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    words = [sys.executable, "-m", "qsf", "serve", str(real.path), "--port", "0"]
    with started([*words, "--ram-budget", "auto", "--ctx-size", "1024"]) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {"model": real.name, "temperature": 0, "max_tokens": 64}
            question = {
                "role": "user",
                "content": "How is the weather in Paris in the next 3 days?",
            }
            form = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
            answer = client.chat.completions.create(
                messages=[question], response_format=form, **asked
            )
            check_city(real, answer.choices[0].message.content)
            tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
            # Also of a model whose template has no tools. A small one would go on with more calls.
            answer = client.chat.completions.create(
                messages=[question],
                tools=[tool],
                tool_choice="required",
                parallel_tool_calls=False,
                **asked,
            )
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "weather"
            check_city(real, call.function.arguments)


def check_city(real: RealModel, text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["city", "days"], f"{real.name}: {text}"
    assert isinstance(value["city"], str)
    assert isinstance(value["days"], int)
