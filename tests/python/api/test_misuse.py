"""Wrong arguments of public functions: typed errors that name the argument, and nothing else."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import qsf
from make.qsf_files import write_tiny
from make.stored import unpack_tokenizer
from qsf.errors import QsfArgumentError
from qsf.native import binding
from qsf.native._qsf import lib
from qsf.options import GenerationOptions, described
from qsf.shell import command
from qsf.text.parts import require_tokenizer

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def model(tiny_llama_8bit: Path) -> Iterator[qsf.Model]:
    with qsf.Model(tiny_llama_8bit, ram_budget=None, max_seq_len=64) as opened:
        yield opened


OF_GENERATE: dict[str, list[Any]] = {
    "stop": [5, [5], [""], b"x"],
    "max_tokens": ["5", True, None, -1],
    "seed": [1.5, -1, 2**64],
    "temperature": ["hot", float("nan"), -1.0],
    "top_k": [0.5],
    "begins_text": ["yes"],
    "progress": [5],
    "top_logprobs": [-1, 101],
    "on_token": [5],
    "prompt": [5, None, [], [1.5], [-1], [10**12], [10**6], b"Once", [1] * 65],
}
OF_MODELS: dict[str, list[Any]] = {
    "kv_rotation": ["x", 1],
    "kv_type": [5, "5bit"],
    "io": ["fast", "", 2, b"direct"],
    "io_depth": [0, 33, True],
    "quality": ["1", -0.1, 1.5, float("nan"), None],
    "pin_threads": [1],
    "exact": ["no"],
    "sessions": [0, None, 257],
    "threads": [0, 1.5, 257],
    "max_seq_len": [True, 2**32],
    "ram_budget": ["lots", "AUTO", 0],
    "path": [5, "a\0b"],
}


@pytest.mark.parametrize("argument", OF_GENERATE)
def test_generate_names_the_argument(model: qsf.Model, argument: str) -> None:
    for value in OF_GENERATE[argument]:
        arguments: dict[str, Any] = {"prompt": PROMPT, argument: value}
        with pytest.raises(qsf.QsfArgumentError, match=argument) as caught:
            model.generate(arguments.pop("prompt"), **arguments)
        assert caught.value.argument == argument, value


@pytest.mark.parametrize("argument", OF_MODELS)
def test_opening_names_the_argument(tiny_llama_8bit: Path, argument: str) -> None:
    for value in OF_MODELS[argument]:
        arguments: dict[str, Any] = {"path": tiny_llama_8bit, argument: value}
        path = arguments.pop("path")
        for use in (qsf.Model, qsf.Model.plan):
            with pytest.raises(qsf.QsfArgumentError, match=argument) as caught:
                use(path, **arguments)
            assert caught.value.argument == argument, value


def test_tokens_and_texts_name_the_argument(model: qsf.Model) -> None:
    uses: list[tuple[str, Callable[..., Any], list[Any]]] = [
        ("ids", model.detokenize, [[10**12], [-1], ["a"], "text", 5, None]),
        ("text", model.tokenize, [5, None, b"x", [1]]),
        ("tokens", model.logits, [[], [10**12], [10**6], "text", 5, [1] * 65]),
        ("n_tokens", model.session.rewind, [-1, 10**6, 1.5, "2", True]),
        ("messages", model.chat_tokens, [5, [5], [{"content": "x"}], b"x"]),
        ("first_row", lambda v: model.logits([1], first_row=v), ["a", -1, 1.5, 1, None, True]),
        (
            "out",
            lambda v: model.logits([1], out=v),
            [5, "x", np.zeros(3), np.zeros((1, 5), np.float32), [[0.0]]],
        ),
    ]
    for argument, call, values in uses:
        for value in values:
            with pytest.raises(qsf.QsfArgumentError) as caught:
                call(value)
            assert caught.value.argument == argument, (argument, value)
    assert model.detokenize([10**6]) == ""
    with pytest.raises(qsf.QsfArgumentError, match="Unicode"):
        model.tokenize("\ud800")


def test_a_missing_or_unknown_argument_is_a_type_error(model: qsf.Model) -> None:
    function: Any
    for function in (qsf.Model, qsf.Model.plan, model.generate, model.session.chat):
        with pytest.raises(TypeError, match="without a name"):
            function()
        with pytest.raises(TypeError, match="ram_budgt"):
            function("x", ram_budgt=5)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 2, 256, 257, 2**31, 2**32, 2**64]),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.lists(st.one_of(st.integers(-2, 3000), st.text(max_size=3), st.none()), max_size=5),
    st.dictionaries(st.sampled_from(["role", "content", "x"]), st.text(max_size=3), max_size=3),
    st.sampled_from(["auto", "4bit", "k8v4", "direct", object(), int, np.zeros(2), {1}, (1, 2)]),
)
NAMES = [option.name for option in described(GenerationOptions)]


def check_error(error: qsf.QsfError) -> None:
    """One line, whatever the argument was."""
    assert len(str(error).splitlines()) == 1


@given(prompt=ODD, options=st.dictionaries(st.sampled_from(NAMES), ODD, max_size=3))
@example(prompt="", options={"constraint": int})
def test_any_arguments_of_generate_give_text_or_a_typed_error(
    model: qsf.Model, prompt: Any, options: dict[str, Any]
) -> None:
    for function in (model.generate, model.session.chat):
        try:
            pieces = function(prompt, **options)
        except qsf.QsfError as error:
            check_error(error)
            continue
        if any(callable(options.get(name)) for name in ("progress", "on_token")):
            continue  # it would be called, and what it raises is the caller's
        for _, piece in zip(range(2), pieces, strict=False):
            assert isinstance(piece, str)
        pieces.close()  # type: ignore[attr-defined]
    model.session.messages.clear()


def test_commands_show_the_argument_as_their_option() -> None:
    error = qsf.QsfArgumentError("io_depth must be less", argument="io_depth")
    assert command.explain(error) == "--io-depth must be less"
    error = qsf.QsfArgumentError("first_row must be less", argument="first_row")
    assert command.explain(error) == "first_row must be less"
    unsupported = qsf.QsfUnsupportedError("io=uring: the kernel has none", argument="io")
    assert command.explain(unsupported, Path("m.qsf")) == "--io uring: the kernel has none"
    damage = qsf.QsfFormatError("unit 3: checksum is 5", is_damage=True)
    assert command.explain(damage, Path("m.qsf")).startswith("m.qsf: unit 3: checksum is 5. The")
    assert "copy it again" in command.explain(damage)


def test_a_changed_byte_is_damage_and_a_strange_file_is_not(
    tiny_llama_8bit: Path, tmp_path: Path
) -> None:
    data = tiny_llama_8bit.read_bytes()
    changed = bytearray(data)
    changed[5000] ^= 1  # a weight: found by the engine
    header = bytearray(data)
    header[20] ^= 1  # found by the Python reader
    for name, content, is_damage in (
        ("weight", bytes(changed), True),
        ("header", bytes(header), True),
        ("short", data[:-1], True),
        ("zip", b"PK\x03\x04" * 100, False),
    ):
        path = tmp_path / f"{name}.qsf"
        path.write_bytes(content)
        with pytest.raises(qsf.QsfFormatError) as caught:
            qsf.Model(path, ram_budget=None)
        assert caught.value.is_damage == is_damage, name


def test_a_file_without_tokenizer_is_refused_before_its_weights_are_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qsf.cli import evaluate
    from qsf.cli.run import main as run
    from qsf.native import binding

    def refuse(*_: object) -> None:
        raise AssertionError("the file was opened")

    monkeypatch.setattr(binding, "NativeModel", refuse)
    path = tmp_path / "mute.qsf"
    write_tiny(path, 1)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    assert run.main([str(path), "-p", "x"]) == 1
    assert "has no tokenizer" in capfd.readouterr().err
    assert evaluate.run([str(path), "--text", str(text)]) == 2
    assert "has no tokenizer" in capfd.readouterr().err


def test_a_tokenizer_json_without_tables_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.qsf"
    write_tiny(path, sections={"TOKN": b"{" + b" " * (10 << 20) + b"}"})
    with pytest.raises(qsf.QsfArgumentError, match=r"only a tokenizer.json \(TOKN\), of a kind"):
        require_tokenizer(path)
    with qsf.Model(path, ram_budget="auto") as model, pytest.raises(qsf.QsfArgumentError):
        _ = model.tokenizer


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("n_chars", [80, 81, 10_000])
def test_what_errors_quote_is_cut_at_80_characters(quote: str, n_chars: int) -> None:
    value = "x" * n_chars
    rest = "the file's name, " + "which isn't short, " * 9
    error = qsf.QsfError(f"{rest}{quote}{value}{quote} is not 'a-' of {rest}'b'")
    most = value if n_chars <= 80 else "x" * 77 + "..."
    assert str(error) == f"{rest}{quote}{most}{quote} is not 'a-' of {rest}'b'"
    assert str(error.located("/p")) == f"/p: {error}"


# ---- the binding: statuses become exceptions, handles become objects ----
@pytest.fixture
def native(tiny_llama_8bit: Path) -> Iterator[binding.NativeModel]:
    opened = binding.NativeModel(tiny_llama_8bit, binding.Options(budget_bytes=0))
    yield opened
    opened.close()


def test_every_status_has_its_exception() -> None:
    statuses = {getattr(lib, name) for name in dir(lib) if name.startswith("QSF_ERR_")}
    assert set(binding._ERROR_OF_STATUS) == statuses
    kinds = [kind for status, kind in binding._ERROR_OF_STATUS.items()
             if status != lib.QSF_ERR_DAMAGED]  # fmt: skip
    assert len(set(kinds)) == len(statuses) - 1


def test_sections_are_read(native: binding.NativeModel, tiny_llama_dir: Path) -> None:
    tokenizer_json = (tiny_llama_dir / "tokenizer.json").read_bytes()
    assert unpack_tokenizer(native.section("TOKN") or b"") == tokenizer_json
    assert native.section("WXYZ") is None


def test_phases_have_names() -> None:
    names = binding.phase_names()
    assert " ".join(names) == (
        "embedding norm qkv attention attn_out gate_up down head wait decompress other"
    )


def test_the_roofline_is_measured() -> None:
    assert binding.measure_roofline(1, 64 * 2**20, 1) > 0.01
    for asked in ((0, 2**26, 1), (1, 2**26 - 1, 1), (1, 2**26, 0), (1, 2**80, 1)):
        with pytest.raises(QsfArgumentError):
            binding.measure_roofline(*asked)
