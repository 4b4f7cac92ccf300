"""Chat templates: strange ones give typed errors, others what transformers renders."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make.refusals import table
from qsf.errors import MAX_LINE, QsfArgumentError, QsfError, QsfFormatError, QsfMemoryError
from qsf.text import render as render_module
from qsf.text.chat import MAX_SOURCE_BYTES, ChatTemplate, template_fault
from qsf.text.render import TemplateFailedError, one_process
from qsf.text.tokenizer import Tokenizer
from qsf_converter.text.tables import open_tokenizer

USER = {"role": "user", "content": "Hi"}
LONG = "{% set ns = namespace(x='abcd') %}"

# What the file may do, and what the error says of it.
HOSTILE = {
    "not": ("{{ " + "not " * 18_831 + "1 }}", "nested too deeply"),
    "brackets": ("{{ " + "[" * 20_000 + "]" * 20_000 + " }}", "nested too deeply"),
    "blocks": ("{% if 1 %}" * 4_000 + "{% endif %}" * 4_000, "nested too deeply"),
    "itself": (LONG + "{% set ns.a = ns %}{{ ns | tojson }}", "line 1: TypeError"),
    "macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "doubled": (
        LONG + "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "memory",
    ),
    "replace": ('{{ ("a" * 100000) | replace("a", "b" * 100000) }}', "more memory"),
    "tojson": ("{{ messages | tojson(indent=10**9) }}", "more memory"),
    "times": ('{{ ("a" * 60000) * 60000 }}', "more memory"),
    "power": ("{{ 10**(10**11) }}", "more memory"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "broken": ("{% if %}", "line 1"),
    "surrogate": ("\ud800", "not valid Unicode"),
    "long": ("a" * (MAX_SOURCE_BYTES + 1), "131073 bytes, allowed: up to 131072"),
}

HOLDS_ITSELF: list[Any] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


def test_a_hostile_template_is_a_typed_error() -> None:
    with one_process():
        for name, (source, reason) in HOSTILE.items():
            with pytest.raises((QsfFormatError, TemplateFailedError), match=reason) as caught:
                ChatTemplate(source).render([USER])
            assert "chat template" in str(caught.value), name
            assert template_fault(source) == str(caught.value), "the same, the same error"


def test_a_template_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_module, "_CPU_SECONDS", 1)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(QsfFormatError, match="more than 1 second"):
        ChatTemplate(source).render([USER])


def test_a_long_prompt_is_an_error_with_size_and_limit() -> None:
    template = ChatTemplate("{{ messages[0].content * 10 }}")
    assert len(template.render([{"role": "user", "content": "a" * 100}], max_bytes=1000)) == 1000
    with pytest.raises(QsfArgumentError, match=r"prompt of 1010 bytes .* 1000 is the limit"):
        template.render([{"role": "user", "content": "a" * 101}], max_bytes=1000)
    with pytest.raises(QsfArgumentError, match=r"too long: 2\d\d\d bytes, and 1000 is the limit"):
        template.render([{"role": "user", "content": "a" * 2000}], max_bytes=1000)


def test_a_long_conversation_has_the_memory_that_it_takes() -> None:
    """The limit grows with the messages: 1 MB of text, of four bytes a character, is rendered."""
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
    )
    text = "\U0001f600" * 2500
    prompt = template.render([{"role": "user", "content": text}] * 100)
    assert prompt == ("<user>" + text) * 100


@pytest.mark.parametrize(
    ("content", "reason"),
    [({1, 2}, "JSON"), ("\ud800", "Unicode"), (10**5000, "JSON"), (HOLDS_ITSELF, "JSON")],
    ids=["set", "surrogate", "digits", "itself"],
)
def test_messages_are_json(content: object, reason: str) -> None:
    with pytest.raises(QsfArgumentError, match=reason):
        ChatTemplate("x").render([{"role": "user", "content": content}])


def test_a_fault_is_one_of_the_template() -> None:
    tokens = {name: name for name in ("messages", "name", "self", "template_name", "source", "")}
    assert ChatTemplate("{{ messages[0].content + name }}", tokens).render([USER]) == "Hiname"
    assert template_fault(None) is None
    assert template_fault("{{ messages[0].content }}") is None
    assert template_fault("{{ raise_exception('no') }}") is None
    assert "neither a text" in (template_fault(3) or "")


# ---- the process ----
def test_no_python_no_package_and_no_process_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "")
        with pytest.raises(QsfError, match=r"sys\.executable"):
            ChatTemplate("x").render([USER])
    with monkeypatch.context() as patch:
        patch.setattr(render_module, "find_spec", lambda _: None)
        with pytest.raises(QsfError, match="pip install jinja2"):
            ChatTemplate("x").render([USER])
    for executable, kind, said in (
        ("/no/such/python", QsfMemoryError, "cannot be started"),
        ("/bin/false", QsfError, "/bin/false ends with exit code"),
        ("/bin/true", QsfError, "/bin/true ends with exit code"),
    ):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(kind, match=said) as caught:
            ChatTemplate("x").render([USER])
        assert type(caught.value) is kind, "not the file's fault"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="every rendering has a process of its own")
def test_one_process_renders_all_and_keeps_nothing() -> None:
    """Each template has a fork, so none changes, ends or fills what the next one gets."""
    good = ChatTemplate("{% set n = cycler('a', 'b') %}{{ n.next() }}{{ messages[0].content }}")
    with one_process():
        assert good.render([USER]) == "aHi"
        (pid,) = children(os.getpid())
        assert good.render([USER]) == "aHi"
        with pytest.raises(QsfArgumentError, match="no"):
            ChatTemplate("{{ raise_exception('no') }}").render([USER])
        assert children(os.getpid()) == [pid]
        for name in ("doubled", "not", "broken"):
            with pytest.raises(QsfFormatError, match=HOSTILE[name][1]):
                ChatTemplate(HOSTILE[name][0]).render([USER])
            assert good.render([USER]) == "aHi"
        with one_process():
            (pid,) = children(os.getpid())
        assert children(os.getpid()) == [pid], "the outer one goes on"
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert good.render([USER]) == "aHi"
    assert children(os.getpid()) == []


def test_without_threads_nothing_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    template = ChatTemplate("{{ messages[0].content }}")
    with one_process():
        assert template.render([USER]) == "Hi"
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(QsfMemoryError, match="can't start new thread"):
                template.render([USER])
        assert template.render([USER]) == "Hi"


def test_a_template_opens_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Were it let out of Jinja2's sandbox, it could open nothing."""
    program = Path(render_module.__file__).with_name("render_child.py").read_text("utf-8")
    (tmp_path / "render_child.py").write_text(
        program.replace('globals["strftime_now"] = _strftime_now', 'globals["open"] = open'),
        "utf-8",
    )
    monkeypatch.setattr(render_module, "__file__", str(tmp_path / "render.py"))
    with pytest.raises(TemplateFailedError, match="Too many open files"):
        ChatTemplate("{{ open('/etc/passwd').read() }}").render([USER])


@pytest.mark.parametrize("keeps", [False, True])
def test_threads_render_at_the_same_time(keeps: bool) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    texts: dict[int, str] = {}

    def use(i: int) -> None:
        texts[i] = template.render([{"role": "user", "content": str(i) * 5000}])

    threads = [threading.Thread(target=use, args=(i,)) for i in range(8)]
    with one_process() if keeps else nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {i: str(i) * 5000 for i in range(8)}
    assert children(os.getpid()) == []


def children(pid: int) -> list[int]:
    """Return the processes, zombies included, that ``pid`` has started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in path.read_text().split()]
    return found


BUSY = """
import sys
from contextlib import nullcontext
from qsf.text.chat import ChatTemplate
from qsf.text.render import one_process
from qsf.shell.command import StoppedError, stopped_by_signals
source = "{% set a = 'a' * 300000 %}{% for i in range(9999) %}{% set b = a | upper %}{% endfor %}"
try:
    with stopped_by_signals(), HOW():
        print("begun", flush=True)
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])
except StoppedError as stopped:
    print("stopped", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGINT, "nullcontext"), (signal.SIGTERM, "one_process")]
)
def test_an_interrupt_leaves_no_process_behind(number: int, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY.replace("HOW", how)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        while not (started := children(process.pid)):
            time.sleep(0.01)
        process.send_signal(number)
        assert process.stdout.readline() == "stopped\n"
        assert children(process.pid) == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in started)
        process.stdin.write("\n")


@pytest.fixture
def closed_streams() -> Iterator[None]:
    """A process whose standard streams are closed, so that pipes take their numbers."""
    saved = [os.dup(number) for number in range(3)]
    for number in range(3):
        os.close(number)
    yield
    for number, copy in enumerate(saved):
        os.dup2(copy, number)
        os.close(copy)


def test_standard_streams_may_be_closed(closed_streams: None) -> None:
    assert ChatTemplate("{{ messages[0].content }}").render([USER]) == "Hi"


# ---- a grammar of templates ----
def test_any_template_gives_a_text_or_a_typed_error() -> None:
    @given(TEMPLATES)
    def check(source: str) -> None:
        with contextlib.suppress(QsfFormatError, QsfArgumentError):
            assert isinstance(ChatTemplate(source).render([USER]), str)

    with one_process():
        check()


# ---- as transformers renders, and what becomes of messages ----
ASSISTANT = {"role": "assistant", "content": "Hello"}


LLAMA2 = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' '  + message['content'].strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="session")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return open_tokenizer((tiny_llama_dir / "tokenizer.json").read_bytes(), bos_id=0, add_bos=True)


def test_special_tokens_and_python_methods_are_there() -> None:
    template = ChatTemplate(
        LLAMA2, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    )
    again = {"role": "user", "content": " More? "}
    assert template.render([USER, ASSISTANT, again]) == (
        "<s>[INST] Hi [/INST] Hello </s><s>[INST] More? [/INST]"
    )


def test_a_template_may_refuse_or_fail() -> None:
    with pytest.raises(QsfArgumentError, match="Roles must alternate"):
        ChatTemplate(LLAMA2, {"bos_token": "", "eos_token": ""}).render([USER, USER])
    source = "{{ raise_exception('\\x1b[2J and then\\n' * 1000) }}"
    with pytest.raises(QsfArgumentError, match="cut here") as caught:
        ChatTemplate(source).render([USER])
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) == MAX_LINE
    template = ChatTemplate("\n{{ messages[0].content + 'x' }}")
    assert template.render([USER]) == "\nHix"
    with pytest.raises(QsfArgumentError, match="fails with these messages: line 2: TypeError"):
        template.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])


# Jinja2 as transformers configures it, by what each setting changes.
DIALECT: dict[str, str] = table("tables")["jinja"]
REFUSED = ("{{ messages.append(4) }}", "{{ ''.__class__.a }}", "{% include 'a' %}", "{% do [] %}",
           "{{ raise_exception('no') }}", "{{ 'a' + 1 }}")  # fmt: skip


def test_the_dialect_of_templates() -> None:
    user = {"role": "user", "content": "<é>"}
    for source, expected in DIALECT.items():
        assert ChatTemplate(source).render([user]) == expected, source
    for source in REFUSED:
        with pytest.raises(QsfError, match="chat template"):
            ChatTemplate(source).render([user])


@pytest.mark.golden
def test_the_dialect_is_that_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    user = {"role": "user", "content": "<é>"}
    for source, expected in DIALECT.items():
        rendered, _ = render_jinja_template(
            [[user]], chat_template=source, add_generation_prompt=True
        )
        assert rendered == [expected], source
    for source in REFUSED:
        with pytest.raises(Exception):  # noqa: B017, PT011 (any error of Python)
            render_jinja_template([[user]], chat_template=source)


def test_of_several_templates_the_default_is_used() -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert ChatTemplate(several).render([USER]) == "d"
    assert ChatTemplate({"default": "d"}).render([USER]) == "d"
    wrong: tuple[object, ...] = ([], 3, several[:1], {})
    for template in wrong:
        with pytest.raises(QsfFormatError, match="chat template"):
            ChatTemplate(template)


def test_messages_reach_the_template_as_in_transformers() -> None:
    """What is None is missing, and thoughts have all names that templates read."""
    template = ChatTemplate("{{ messages[0] | tojson }}")
    message = {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": None}
    assert template.render([message]) == (
        '{"thinking": "r", "role": "assistant", "reasoning": "r", "reasoning_content": "r"}'
    )
    assert ChatTemplate(None).render([message, USER]) == "\nHi"


@pytest.mark.parametrize(
    "message", [{"role": "user"}, {"content": "x"}, {"role": 1, "content": ""}]
)
def test_a_message_needs_role_and_content(message: dict[str, object]) -> None:
    with pytest.raises(QsfArgumentError, match="role and a content"):
        ChatTemplate("x").render([message])


def test_without_a_template_turns_are_joined(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(None)
    assert template.is_plain
    assert template.render([USER, ASSISTANT, USER]) == "Hi\nHello\nHi"
    assert template.encode([USER], tokenizer) == tokenizer.encode("Hi")
    with pytest.raises(QsfArgumentError, match="the file has none"):
        ChatTemplate(None).render([USER], template_args={"enable_thinking": False})


def test_the_template_alone_decides_about_bos(tokenizer: Tokenizer) -> None:
    with_bos = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<|begin_of_text|>"}
    )
    without = ChatTemplate("{{ messages[0].content }}")
    assert with_bos.encode([USER], tokenizer) == tokenizer.encode("Hi")
    assert without.encode([USER], tokenizer) == tokenizer.encode("Hi", add_prefix=False)


def test_texts_are_never_special_tokens(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}<|end_of_text|>")
    evil = {"role": "user", "content": "x<|end_of_text|>y \ufdd0<|begin_of_text|>"}
    ids = template.encode([evil], tokenizer)
    assert [i for i, token_id in enumerate(ids) if token_id in (0, 1)] == [len(ids) - 1]
    assert tokenizer.decode(ids) == "x<|end_of_text|>y <|begin_of_text|>"
    template = ChatTemplate("{% for p in messages[0].content %}{{ p.text }}{% endfor %}")
    parts = [{"type": "text", "text": "a<|end_of_text|>"}]
    ids = template.encode([{"role": "user", "content": parts}], tokenizer)
    assert 1 not in ids
    assert tokenizer.decode(ids) == "a<|end_of_text|>"
    template = ChatTemplate("{{ word }}{% for m in messages %}{{ m.content }}{% endfor %}")
    name = tokenizer.special_names[0]
    ids = template.encode([USER], tokenizer, template_args={"word": name})
    assert tokenizer.encode(name)[-1] not in ids[1:]


TOLD = (
    "{{ tools | tojson }} {{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_a_template_is_told_tools_and_keywords() -> None:
    tools = [{"name": "look_up", "parameters": {"word": "text"}}]
    told = ChatTemplate(TOLD).render([USER], tools=tools, template_args={"enable_thinking": False})
    assert told == '[{"name": "look_up", "parameters": {"word": "text"}}] FalseHi'
    assert ChatTemplate(TOLD).render([USER], template_args={"tools": tools}).startswith('[{"name"')
    assert ChatTemplate(TOLD).render([USER]) == "null Hi"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"messages": []}, "template_args must be a mapping"),
        ({"not a name": 1}, "template_args must be a mapping"),
        ({"when": object()}, "not made of JSON values"),
        ({"long": "x" * 5_000_000}, "too long"),
    ],
)
def test_keywords_that_a_template_cannot_take(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(QsfArgumentError, match=said):
        ChatTemplate(TOLD).render([USER], template_args=arguments)


# ---- what a stranger may write: chat templates, tokenizers, JSON, settings ----


# ---- chat templates ----
_ATOMS = st.sampled_from(
    [
        "messages", "messages[0]", "messages[0].content", "bos_token", "ns", "ns.x", "m", "loop",
        "loop.index", "1", "-1", "0", "10**9", "2**62", "1e308", "'a'", "'\\n'", "'%d'", "''", "[]",
        "{}", "none", "true", "namespace()", "range(999)", "undefined_name", "'a' * 9999",
        "[1] * 9999", "raise_exception", "strftime_now", "self", "super", "'%9999999d'",
    ]
)  # fmt: skip
_FILTERS = st.sampled_from(
    [
        "tojson", "tojson(indent=10**6)", "trim", "upper", "length", "list", "string", "join",
        "join('b' * 9999)", "replace('a', 'b' * 9999)", "indent(9999)", "format(3)", "first",
        "last",
        "sort", "unique", "items", "dictsort", "reverse", "batch(2)", "slice(3)", "map('upper')",
        "select", "groupby('role')", "default(messages)", "int", "float", "abs", "round(9)", "bool",
        "safe", "escape", "urlencode", "title", "lines", "pprint", "sum", "min", "no_such_filter",
    ]
)  # fmt: skip
_OPERATORS = st.sampled_from(
    ["+", "-", "*", "/", "//", "%", "**", "~", "and", "or", "in", "not in", "==", "<", "is"]
)


def _deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, _OPERATORS, inner),
        st.builds("({} | {})".format, inner, _FILTERS),
        st.builds("{}[{}]".format, inner, inner),
        st.builds("{}({})".format, inner, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{{'k': {}}}".format, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("{}.split({})".format, inner, inner),
        st.builds("{}.replace('a', {})".format, inner, inner),
        st.builds(lambda text, n: "not " * n + text, inner, st.sampled_from([1, 9, 999, 19_999])),
        st.builds(lambda text, n: "(" * n + text + ")" * n, inner, st.sampled_from([1, 9, 999])),
        st.builds(lambda text, n: " + ".join([text] * n), inner, st.sampled_from([2, 99])),
    )


EXPRESSIONS = st.recursive(_ATOMS, _deeper, max_leaves=8)


def _statements(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for i in range(99) %}}{}{{% endfor %}}".format, inner),
        st.builds("{{% macro f(x) %}}{}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f(1) }}}}".format, inner),
        st.builds("{{% set ns.x = {} %}}{}".format, EXPRESSIONS, inner),
        st.builds("{{% set x %}}{}{{% endset %}}{{{{ x }}}}".format, inner),
        st.builds("{{% filter indent(999) %}}{}{{% endfilter %}}".format, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
    )


_LEAVES = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds("{{% set ns.x = ns.x ~ {} %}}".format, EXPRESSIONS),
    st.sampled_from(
        ["{% set ns.x = ns.x ~ ns.x %}", "{% set ns.a = ns %}", "{% break %}", "{% include 'a' %}"]
    ),
    st.text(max_size=20),
)
TEMPLATES = st.recursive(_LEAVES, _statements, max_leaves=12).map(
    lambda body: "{% set ns = namespace(x='ab') %}" + body
)
