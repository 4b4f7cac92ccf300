# SPDX-License-Identifier: Apache-2.0
"""Whatever a checkpoint's JSON and templates say: a file whose default run works, or one typed
error; the tokens that end a turn, and the fixed form of a template."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from make import hf_makers
from make.hf_makers import tokenizer_json
from qsf.errors import QsfConversionError
from qsf.file.reader import Reader
from qsf.text.chat import ChatTemplate
from qsf.text.parts import read_text_parts
from qsf.text.render import one_process
from qsf.text.sampling import end_ids, resolve_sampling
from qsf.text.tokenizer import Tokenizer, byte_of_char
from qsf_converter import cli, convert
from qsf_converter.sources import gguf_config
from qsf_converter.sources.usable import chat_form, joined, usable_chat, with_turn_ends
from qsf_converter.text.tables import open_tokenizer

HUGE = 10**400
WEIRD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**19, HUGE, -HUGE]),
    st.sampled_from([0.0, -1.0, 1.5, 40.0, 1e9, 1e308, 1e-320, float("nan"), float("inf")]),
    st.sampled_from(["", "x", "\ud800", "\0", "y" * 5000, "{{ 'a' }}", "{% if %}", "{{ " * 500]),
    st.sampled_from(["linear", "llama3", "full_attention", "silu", "default", "LlamaForCausalLM"]),
    st.text(max_size=8),
    st.integers(-3, 60),
)
VALUES = st.recursive(
    WEIRD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["name", "template", "content", "factor", "rope_type", "type", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=6,
)
CONFIG_FIELDS = [
    *hf_makers.LLAMA_CONFIG, "layer_types", "sliding_window", "rope_scaling", "rope_parameters",
    "quantization_config", "attention_bias", "mlp_bias", "pad_token_id", "num_local_experts",
]  # fmt: skip
GENERATION_FIELDS = [
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample", "eos_token_id",
    "bos_token_id", "pad_token_id", "typical_p", "",
]  # fmt: skip
TOKENIZER_FIELDS = [
    "chat_template", "bos_token", "eos_token", "unk_token", "add_bos_token", "add_eos_token",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_renderer() -> Iterator[None]:
    """One process renders all templates, as in a conversion."""
    with one_process():
        yield


def objects(names: list[str], max_size: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), VALUES, max_size=max_size)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = hf_makers.llama(tmp_path_factory.mktemp("hostile") / "m")
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return folder


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def check_command(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the command; return "" after exit 0 and a usable file, else the one error line."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "m.qsf"
        capsys.readouterr()
        code = cli.run([str(folder), str(out), "--quiet", *options])
        said = capsys.readouterr()
        assert said.out == ""
        errors = [line for line in said.err.splitlines() if "qsf-convert: warning: " not in line]
        if code == 0:
            assert errors == []
            check_usable(out)
            return ""
        assert code == 1, said.err
        assert len(errors) == 1, said.err
        assert errors[0].startswith("qsf-convert: error: ")
        assert "internal error" not in errors[0]
        assert len(errors[0]) < 1000
        assert list(Path(place).iterdir()) == []
        return errors[0]


def check_usable(out: Path) -> None:
    """Read the text parts of the file as qsf-run does before the first token."""
    parts = read_text_parts(out)
    with Reader(out) as reader:
        reader.verify()
        header = reader.header
    assert parts.tokenizer is not None
    assert parts.tokenizer.encode("Hello")
    resolve_sampling(parts.generation)
    end_ids(header.eos_id, parts.generation)
    assert not isinstance(parts.template, Exception)


@given(
    config=objects(CONFIG_FIELDS, 2),
    generation=objects(GENERATION_FIELDS, 4),
    tokenizer=objects(TOKENIZER_FIELDS, 3),
)
@example({}, {"top_k": -1}, {})
@example({}, {"temperature": 1e9, "top_p": float("nan")}, {})
@example({}, {"eos_token_id": "x"}, {})
@example({"eos_token_id": [2, "x"]}, {}, {})
@example({"layer_types": 5, "architectures": ["MistralForCausalLM"]}, {}, {})
@example({"rms_norm_eps": HUGE}, {}, {})
@example({}, {}, {"chat_template": [{"name": ["a"], "template": "x"}]})
@example({}, {}, {"chat_template": "{% if %}"})
@example({}, {}, {"chat_template": "\ud800"})
def test_hostile_json(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    generation: dict[str, Any],
    tokenizer: dict[str, Any],
) -> None:
    write(checkpoint / "config.json", {**hf_makers.LLAMA_CONFIG, **config})
    write(checkpoint / "generation_config.json", generation)
    write(checkpoint / "tokenizer_config.json", tokenizer)
    check_command(checkpoint, capsys)


@pytest.fixture
def clean(checkpoint: Path) -> Path:
    write(checkpoint / "config.json", hf_makers.LLAMA_CONFIG)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / "tokenizer.json").write_bytes(tokenizer_json())
    return checkpoint


@pytest.mark.parametrize(
    ("said", "kept", "warned"),
    [
        ({"top_k": -1}, {"top_k": 0}, "top_k = -1 is taken as 0"),
        ({"top_k": 40.0}, {"top_k": 40}, ""),
        ({"temperature": 1e9}, {}, "must be a number from 0 to 100"),
        ({"temperature": float("nan"), "top_p": 0.5}, {"top_p": 0.5}, "temperature"),
        ({"eos_token_id": "x"}, {}, "is not a token id"),
        ({"eos_token_id": [2, "x", 3]}, {"eos_token_id": [2, 3]}, "is taken as [2, 3]"),
        ({"typical_p": float("inf")}, {}, "typical_p"),
        ({"top_k": 5, "max_length": 20}, {"top_k": 5, "max_length": 20}, ""),
    ],
)
def test_generation_defaults(
    clean: Path, tmp_path: Path, said: dict[str, Any], kept: dict[str, Any], warned: str
) -> None:
    write(clean / "generation_config.json", said)
    report = convert(clean, tmp_path / "m.qsf")
    generation = dict(read_text_parts(tmp_path / "m.qsf").generation)
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3]}
    assert generation == {**ids, **kept}
    assert any(warned in one for one in report.warnings) if warned else report.warnings == ()


@pytest.mark.parametrize(
    "template",
    [
        *("{% if %}", "{{ 1 + }}", 5, {"default": 1}, ["x"], "{{ x.y.z }}"),
        [{"name": "rag", "template": "x"}],
        [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "{{ tools.x.y }}"}],
    ],
)
def test_a_template_that_cannot_be_used_is_an_error_unless_allowed(
    clean: Path, tmp_path: Path, template: object
) -> None:
    write(clean / "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(QsfConversionError, match=r"chat template.*--allow-no-template"):
        convert(clean, tmp_path / "m.qsf")
    report = convert(clean, tmp_path / "m.qsf", allow_no_template=True)
    assert "the chat template is left out" in report.warnings[0]
    parts = read_text_parts(tmp_path / "m.qsf")
    assert not isinstance(parts.template, Exception)
    assert parts.template.is_plain


def test_a_template_that_refuses_a_message_stays(clean: Path, tmp_path: Path) -> None:
    source = "{{ raise_exception('a system message first') }}"
    write(clean / "tokenizer_config.json", {"chat_template": source})
    assert convert(clean, tmp_path / "m.qsf").warnings == ()
    parts = read_text_parts(tmp_path / "m.qsf")
    assert not isinstance(parts.template, Exception)
    assert not parts.template.is_plain


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "there is no tokenizer.json"),
        (b"{}", "a tokenizer.json of an unknown form"),
        (b'{"model": "\\ud800"}', "lone surrogate"),
        (tokenizer_json(n_first=50), "it makes the token"),
    ],
)
def test_no_usable_tokenizer_is_refused(
    clean: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: bytes | None,
    reason: str,
) -> None:
    (clean / "tokenizer.json").unlink()
    if content is not None:
        (clean / "tokenizer.json").write_bytes(content)
    line = check_command(clean, capsys)
    assert reason in line
    if reason != "lone surrogate":
        assert "--allow-no-tokenizer" in line
        out = tmp_path / "m.qsf"
        assert cli.run([str(clean), str(out), "-q", "--allow-no-tokenizer"]) == 0
        assert read_text_parts(out).tokenizer is None
        report = convert(clean, tmp_path / "python.qsf")  # where it is not asked for
        assert report.warnings[-1].startswith("without a tokenizer")


JSON_FILES = ["config.json", "generation_config.json", "tokenizer_config.json"]


@pytest.mark.parametrize("n_digits", [31, 308, 309, 4300])
@pytest.mark.parametrize("name", [*JSON_FILES, "tokenizer.json"])
def test_whole_numbers_have_any_number_of_digits(
    clean: Path, capsys: pytest.CaptureFixture[str], name: str, n_digits: int
) -> None:
    old = (clean / name).read_text() if (clean / name).exists() else "{}"
    value = "1" + "0" * (n_digits - 1)  # model_max_length is int(1e30) in published files
    more = "" if old == "{}" else f", {old[1:-1]}"
    (clean / name).write_text(f'{{"model_max_length": {value}{more}}}')
    assert check_command(clean, capsys) == ""
    (clean / name).write_text(f"\ufeff{(clean / name).read_text()}")  # a mark, as of Windows
    assert check_command(clean, capsys) == ""
    if name in JSON_FILES:
        write(clean / name, {**json.loads(old), "other": "\ud800"})  # no field can hold it
        assert name in check_command(clean, capsys)


def test_names_that_are_not_utf8(clean: Path, tmp_path: Path) -> None:
    folder = Path(f"{tmp_path}/m\udcff")
    clean_copy = [(one.name, one.read_bytes()) for one in clean.iterdir() if one.is_file()]
    folder.mkdir()
    for name, data in clean_copy:
        (folder / name).write_bytes(data)
    command = [sys.executable, "-m", "qsf_converter.cli", str(folder), f"{tmp_path}/o\udcff.qsf"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"internal error" not in done.stderr
    check_usable(Path(f"{tmp_path}/o\udcff.qsf"))


@pytest.mark.parametrize("eot", [[7], np.array([7, 8]), "7", 7.0, None])
def test_an_end_of_turn_that_is_no_token_is_ignored(eot: object) -> None:
    said: dict[str, Any] = {"tokenizer.ggml.eot_token_id": eot}
    assert gguf_config._token_ids(said) == {}
    said["tokenizer.ggml.eos_token_id"] = 2
    assert gguf_config._token_ids(said) == {"eos_token_id": 2}
    said |= {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 1}  # of a message
    assert gguf_config._token_ids(said) == {"eos_token_id": [2, 0, 1]}


# ---- what is found in chat templates ----


# Abridged templates with the features of published ones.
PUBLISHED = Path(__file__).parents[2] / "data" / "templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(*special: str, plain: tuple[str, ...] = ()) -> Tokenizer:
    """Make a tokenizer of bytes; the special tokens have the ids from 256 on, then plain ones."""
    added = [
        {"id": 256 + i, "content": text, "special": text in special, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for i, text in enumerate((*special, *plain))
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    data = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None,
        "pre_tokenizer": {**byte_level, "use_regex": True}, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_of_char(), "merges": []},
    }  # fmt: skip
    return open_tokenizer(json.dumps(data).encode(), bos_id=None)


def ends_of(template: str | None, tokenizer: Tokenizer, eos: Any = None, **tokens: str) -> Any:
    generation = {} if eos is None else {"eos_token_id": eos}
    chat = {"chat_template": template, "special_tokens": tokens, "generation": generation}
    ends = with_turn_ends(chat, tokenizer)["generation"].get("eos_token_id")
    if not isinstance(ends, list):
        return ends
    return [tokenizer.token_bytes(end, skip_special=False).decode() for end in ends]


def test_the_template_says_what_the_metadata_leaves_out() -> None:
    tokenizer = tokenizer_with("<|base_end|>", "<|im_start|>", "<|im_end|>")
    assert ends_of(CHATML, tokenizer, 256) == ["<|base_end|>", "<|im_end|>"]
    assert ends_of(CHATML, tokenizer) == ["<|im_end|>"]
    assert ends_of(CHATML, tokenizer, 258) == 258, "nothing is added"
    assert ends_of(None, tokenizer, 256) == 256, "without a template there are no turns"


def loop(body: str) -> str:
    return f"{{% for m in messages %}}{body}{{% endfor %}}"


# The template (else the published one of that name), the special tokens, and which end a turn
CASES = {
    "any text": (loop("[{{ m.role }}]{{ m.content }}<eot>\n"), "<eot> <x>", "<eot>"),
    "between turns": (loop("{{ m.content }}{{ ' <x> ' if not loop.last }}"), "<x>", "<x>"),
    "the next turn": (loop("<|{{ m.role }}|>\n{{ m.content }}"), "<|user|> <|assistant|>", "<|user|>"),
    "a text in between": (loop("{{ m.content }}{{ '\\nUser: <x>' if not loop.last }}"), "<x>", ""),
    "in words": (loop("{{ m.content }}<c>message<s><e>\n"), "<c> <s> <e>", "<e>"),
    "a mark that is no token": (loop("{{ m.content }}<y>\n"), "<x>", ""),
    "an answer is refused": ("{{ raise_exception('no') }}", "<x>", ""),
    "known marks": (CHATML, "<|im_end|> <|endoftext|> <|eom_id|> <|call|>", "<|im_end|> <|eom_id|> <|endoftext|>"),
    # A mark of the answer's own comes first
    "command-r": ("", "<|END_RESPONSE|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    # An end of the whole instead of the next turn
    "phi-3": ("", "<|end|> <|user|> </s>", "</s> <|end|>"),
    "llama-2": ("", "<s> </s>", "</s>"),
    "gemma": ("", "<start_of_turn> <end_of_turn>", "<end_of_turn>"),
    # <|end|> is between thoughts and the answer
    "gpt-oss": ("", "<|end|> <|return|> <|call|> <|start|>", "<|return|>"),
    "qwen3": ("", "<|im_end|> <|im_start|> </think> </tool_call>", "<|im_end|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ends_of_templates(name: str) -> None:
    template, special, ends = CASES[name]
    template = template or (PUBLISHED / f"{name}.jinja").read_text("utf-8")
    tokens = {"eos_token": "</s>"} if "</s>" in special else {}
    found = ends_of(template, tokenizer_with(*special.split()), **tokens)
    assert found == (ends.split() or None)


def test_a_text_that_is_no_token_ends_a_turn() -> None:
    def texts(body: str, *special: str, after: str = "", **generation: Any) -> Any:
        template = loop(body) + after
        chat = {"chat_template": template, "special_tokens": {}, "generation": generation}
        return with_turn_ends(chat, tokenizer_with(*special))["generation"].get("stop_strings")

    assert texts("{{ m.role }}: {{ m.content }}\n### End\n\n") == ["### End"]
    assert texts("{{ m.content }}<|im_end|>\n", stop_strings="x") == ["x", "<|im_end|>"]
    assert texts("{{ m.content }}<|im_end|>\n", "<|im_end|>") is None, "a token does"
    assert texts("{{ m.content }}\n---\n") is None, "stands within answers"
    assert texts("User: {{ m.content }}\n") is None, "the next turn is no end"
    header = texts("GPT4 {{ m.role }}: {{ m.content }}\n", after="GPT4 assistant:")
    assert header is None, "half of the next header"
    thought = "{% if m.reasoning_content %}<msg>{{ m.reasoning_content }}</msg>{% endif %}"
    assert texts(f"{thought}<msg>{{{{ m.content }}}}</msg>\n") is None, "ends thoughts, too"


def test_a_mark_of_the_template_need_not_be_special() -> None:
    """Many fine-tunes add their marks as ordinary tokens."""
    tokenizer = tokenizer_with(plain=("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    assert ends_of(CHATML, tokenizer) == ["<|im_end|>"]


def test_the_tokenizers_own_end_is_one() -> None:
    assert ends_of("{{ messages[0].content }}", tokenizer_with("<e>"), eos_token="<e>") == ["<e>"]


# ---- the fixed form ----
_ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + _ANSWER
_TRIMMED = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
)
_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|system|>You help.<|end|>{% endif %}" + _CHATML
)
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + _CHATML
_MERGED = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = '<<' + m.content + '>>' %}{% elif m.role == 'user' %}[I]{{ ns.s }}"
    "{{ m.content }}[/I]{% set ns.s = '' %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
_TURNS = (" one", "two ", "three\n", "4", "five")


@pytest.mark.parametrize("source", [_CHATML, _TRIMMED, _DEFAULT_SYSTEM, _NO_SYSTEM, _MERGED])
def test_a_form_makes_what_the_template_makes(source: str) -> None:
    """The texts around messages are found: for systems, defaults, and messages without spaces."""
    special = {"bos_token": "<s>"}
    form = chat_form(source, special)
    assert form is not None
    assert ("system" in form) == (source != _NO_SYSTEM)
    roles = ("user", "assistant")
    for system in (None, " Be brief. ")[: 1 + ("system" in form)]:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [{"role": roles[i % 2], "content": t} for i, t in enumerate(_TURNS)]
        expected = ChatTemplate(source, special).render(messages)
        assert joined(form, _TURNS, system) == expected


@pytest.mark.parametrize(
    "source",
    [
        None,
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",  # counts
        "{{ strftime_now('%Y') }}" + _CHATML,  # the day of the conversion must not stay
        "{{ messages[-1].content }}",  # the past is not there
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% if messages | length > 3 %}long {% endif %}" + _CHATML,
    ],
)
def test_a_template_without_a_form_gets_none(source: str | None) -> None:
    """A form that would make other prompts is worse than none."""
    assert chat_form(source, {}) is None


def test_the_section_has_the_form() -> None:
    """CHAT keeps the template and has its form beside it."""
    chat = {"chat_template": _CHATML, "special_tokens": {}, "generation": {}}
    data, _, _ = usable_chat(json.dumps(chat).encode(), {})
    assert json.loads(data)["form"]["ask"] == "<|end|><|assistant|>"
