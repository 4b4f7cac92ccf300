"""The page at ``/`` in headless Chromium: chat, stop, edit, Markdown, what is kept."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from make.chromium import Browser, find_browser
from make.harmony import ANSWER, TEXT, THOUGHTS, make_harmony
from make.refusals import table
from make.served import Client, after_passes, scripted, serving
from qsf import Model
from qsf.cli.serve_options import ServeOptions

PHONE, DESK = (360, 740), (1100, 800)


def test_the_page_is_small_and_takes_nothing_from_elsewhere(client: Client) -> None:
    page = client.get("/")
    assert page.status == 200
    assert len(page.body) < 40_000
    assert re.findall(rb"https?://|//[a-z]+\.|@import|url\(", page.body) == []
    assert b"innerHTML" not in page.body
    assert b"style=" not in page.body
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert client.get("/", host="localhost").status == 200


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    found = find_browser()
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Chromium is missing: tools/bootstrap.sh page")
        pytest.skip("needs Chromium: tools/bootstrap.sh page")
    with Browser(found, tmp_path) as opened:
        yield opened


def set_field(browser: Browser, name: str, value: object) -> None:
    browser.run(f"localStorage.setItem('qsf {name}', {str(value)!r})")


def texts(browser: Browser) -> Any:
    return browser.run("[...document.querySelectorAll('.text')].map(e => e.textContent)")


def plain(found: list[str]) -> list[list[str]]:
    return [text.split() for text in found]


def is_done(browser: Browser, n_cards: int) -> None:
    browser.wait_for(f"!running && document.querySelectorAll('article').length === {n_cards}")


def overflow(browser: Browser) -> Any:
    return browser.run(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('dialog:not([open])') && "
        "!e.closest('.hidden') && e.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map(e => e.tagName + e.id)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")])
def test_a_conversation(
    client: Client, browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    browser.show(client.url, size, scheme)
    for name, value in (("temperature", 0), ("max_tokens", 30)):
        set_field(browser, name, value)
    browser.show(client.url, size, scheme)
    browser.wait_for("contextTokens === 512")
    assert browser.run("document.title") == "tiny-chat - QSF"
    assert browser.run("document.activeElement.id") == "text"
    colour = {"light": "rgb(250, 249, 246)", "dark": "rgb(19, 21, 24)"}[scheme]
    assert browser.run("getComputedStyle(document.body).backgroundColor") == colour

    browser.type("Tell me a story")
    browser.press("Enter")
    is_done(browser, 2)
    answer = client.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Tell me a story"}],
        temperature=0,
        max_tokens=30,
    ).json["choices"][0]["message"]["content"]
    assert browser.run("messages.map(message => message.content)") == ["Tell me a story", answer]
    assert plain(texts(browser)) == plain(["Tell me a story", answer])
    assert browser.run("$('said').textContent") == f"The answer: {answer}"
    assert "tokens/s" in browser.run("$('speed').textContent")
    assert " of 512 tokens" in browser.run("$('used').textContent")
    assert 0 < browser.run("$('context').value") < 1

    browser.run("document.querySelector('[aria-label=\"Write this answer again\"]').click()")
    is_done(browser, 2)
    assert plain(texts(browser)) == plain(["Tell me a story", answer])
    assert "reused" in browser.run("$('speed').textContent")

    browser.run("$('text').focus()")
    browser.type("And then?")
    browser.press("Enter")
    is_done(browser, 4)
    assert overflow(browser) == []
    assert browser.run("document.documentElement.scrollWidth") == size[0]
    (tmp_path / "chat.png").write_bytes(browser.picture())

    browser.run("document.querySelectorAll('[aria-label=\"Edit this message\"]')[0].click()")
    assert browser.run("[$('text').value, messages.length]") == ["Tell me a story", 0]
    browser.run("$('open').click()")
    assert browser.run("$('settings').open")
    assert overflow(browser) == []
    (tmp_path / "settings.png").write_bytes(browser.picture())
    browser.press("Escape")
    assert not browser.run("$('settings').open")
    assert browser.errors == []


@pytest.mark.slow
def test_stop_and_errors(client: Client, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    browser.show(client.url, DESK, "light")
    set_field(browser, "max_tokens", 400)
    browser.show(client.url, DESK, "light")
    browser.wait_for("contextTokens === 512")
    after_passes(client, monkeypatch, 4, lambda: time.sleep(0.05))
    browser.type("Tell me a story")
    browser.press("Enter")
    browser.wait_for("running && messages[1].content")
    assert browser.run("[$('send').hidden, $('stop').hidden]") == [True, False]
    browser.press("Escape")
    is_done(browser, 2)
    assert browser.run("document.querySelector('.error').textContent") == "stopped"
    assert browser.run("[$('send').hidden, $('stop').hidden]") == [False, True]
    monkeypatch.undo()

    browser.run("$('new').click()")
    assert browser.run("document.querySelectorAll('article').length") == 0
    browser.run("$('text').value = 'x '.repeat(3000)")
    browser.run("$('send').click()")
    is_done(browser, 2)
    assert "and the context holds 512" in browser.run(
        "document.querySelector('.error').textContent"
    )


@pytest.mark.slow
def test_names_for_a_screen_reader(client: Client, browser: Browser) -> None:
    browser.show(client.url, DESK, "light")
    browser.run("$('open').click()")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "textbox", "spinbutton", "meter", "dialog")
    unnamed = [
        node["role"]["value"]
        for node in nodes
        if not node["ignored"]
        and node["role"]["value"] in roles
        and not node.get("name", {}).get("value")
    ]
    assert unnamed == []
    assert sum(node.get("role", {}).get("value") == "spinbutton" for node in nodes) == 7


MARKDOWN = table("tables")["markdown"]
HOSTILE = table("tables")["hostile markdown"]


def rendered(browser: Browser, text: str, what: str = "innerHTML") -> Any:
    return browser.run(f"markdown(element('div'), {json.dumps(text)}.split('\\n')).{what}")


@pytest.mark.slow
def test_markdown(client: Client, browser: Browser) -> None:
    browser.show(client.url, DESK, "light")
    for text, html in MARKDOWN.items():
        assert rendered(browser, text) == html, text
    code = (
        "markdown(element('div'), 'a\\n~~~py\\nx = 1\\n\\n# y'.split('\\n')).querySelector('.code')"
    )
    assert browser.run(f"{code}.querySelector('code').textContent") == "x = 1\n\n# y"
    assert browser.run(f"{code}.querySelector('span').textContent") == "py"
    browser.run(
        f"document.execCommand = () => (copied = document.querySelector('body > textarea').value); "
        f"copied = ''; Object.defineProperty(navigator, 'clipboard', {{value: undefined}}); "
        f"{code}.querySelector('button').click()"
    )
    browser.wait_for("copied === 'x = 1\\n\\n# y'")
    grown = "a = element('div'); markdown(a, ['one', '', 'tw']); b = a.firstChild; "
    assert browser.run(grown + "markdown(a, ['one', '', 'two']); a.firstChild === b") is True
    assert browser.run("a.textContent") == "onetwo"


@pytest.mark.slow
def test_no_text_of_a_model_becomes_html(client: Client, browser: Browser) -> None:
    browser.show(client.url, DESK, "light")
    made = {"P", "A", "UL", "OL", "LI", "H3", "BLOCKQUOTE", "TABLE", "TBODY", "TR", "TH", "TD"}
    made |= {"DIV", "SPAN", "BUTTON", "PRE", "CODE"}
    for text in HOSTILE:
        found = browser.run(
            f"[...markdown(element('div'), {json.dumps(text)}.split('\\n')).querySelectorAll('*')]"
            ".map(e => [e.tagName, e.getAttributeNames(), e.href || ''])"
        )
        assert {tag for tag, _, _ in found} <= made, text
        names = {name for _, attributes, _ in found for name in attributes}
        assert names <= {"href", "target", "rel", "class", "type", "aria-label", "start"}
        assert all(href.startswith("https://e.org/") for _, _, href in found if href)
        for word in re.findall(r"<script>|<svg|<iframe|<img|<!--", text):
            assert word in rendered(browser, text, "textContent") or quote(word) in str(found)
    for unit in (">", "- ", "*", "`", "[", "**a ", "_a", "|", "# ", "  - x\n"):
        started = time.monotonic()
        rendered(browser, unit * 3000, "textContent")
        assert time.monotonic() - started < 5, unit
    assert browser.errors == []


@pytest.mark.slow
def test_conversations_are_kept(client: Client, browser: Browser) -> None:
    browser.show(client.url, DESK, "light")
    set_field(browser, "max_tokens", 5)
    browser.show(client.url, DESK, "light")
    browser.wait_for("contextTokens === 512")
    for text in ("First <b>one</b>", "Second one"):
        browser.run("$('new').click()")
        browser.type(text)
        browser.press("Enter")
        is_done(browser, 2)
    used = browser.run("$('used').textContent")
    browser.show(client.url, PHONE, "light")
    titles = "[...$('chats').querySelectorAll('button:first-child')].map(e => e.textContent)"
    assert browser.run(titles) == ["Second one", "First <b>one</b>"]
    assert browser.run("$('chats').hidden")
    browser.run("$('list').click()")
    assert not browser.run("$('chats').hidden")
    browser.run("$('chats').querySelectorAll('button:first-child')[0].click()")
    assert browser.run("$('chats').hidden")
    assert texts(browser)[0] == "Second one"
    browser.wait_for("contextTokens === 512")
    assert browser.run("$('used').textContent") == used
    browser.run("enter(Object.keys(localStorage).filter(name => name.startsWith(CHAT)).sort()[0])")
    assert texts(browser)[0] == "First <b>one</b>"
    assert browser.run(titles) == ["Second one", "First <b>one</b>"]  # the last one written
    browser.run("$('chats').querySelectorAll('button:first-child')[0].click()")
    browser.run("confirm = () => true; $('chats').querySelector('[aria-label^=Delete]').click()")
    assert browser.run(titles) == ["First <b>one</b>"]
    assert texts(browser) == []
    browser.run("localStorage.setItem('x', 'x'.repeat(5 * 2 ** 20 - 2000))")
    browser.run("messages = [{ role: 'user', content: 'y'.repeat(5000) }]; keep()")
    assert "keeps no more" in browser.run("$('speed').textContent")


@pytest.mark.slow
def test_thoughts_are_folded(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_harmony(tmp_path)) as client:
        scripted(client, monkeypatch, TEXT)
        browser.show(client.url, PHONE, "dark")
        browser.wait_for("contextTokens")
        browser.type("Who are you?")
        browser.press("Enter")
        is_done(browser, 2)
        assert texts(browser)[1] == ANSWER
        thoughts = "document.querySelector('.assistant details')"
        assert browser.run(f"[{thoughts}.open, {thoughts}.hidden]") == [False, False]
        assert browser.run(f"{thoughts}.textContent") == "Thoughts" + THOUGHTS + "{}"
        assert browser.run("asked().messages.length, messages.push({}), asked().messages[1]") == {
            "role": "assistant",
            "content": ANSWER,
            "reasoning_content": THOUGHTS + "{}",
        }


@pytest.mark.slow
def test_the_choice_of_a_model(tiny_chat_8bit: Path, browser: Browser) -> None:
    paths = {"chat": tiny_chat_8bit, "second": tiny_chat_8bit}

    def load(name: str, *_: object) -> tuple[Model, str]:
        sessions = ServeOptions(parallel=1).sessions()[0]
        return Model(paths[name], ram_budget=None, threads=1, **sessions), ""

    with serving(paths["chat"], paths=paths, load=load, parallel=1) as client:
        browser.show(client.url, DESK, "light")
        set_field(browser, "max_tokens", 5)
        browser.show(client.url, DESK, "light")
        browser.wait_for("contextTokens")
        options = "[...$('model').options].map(e => e.text)"
        assert browser.run(options) == ["chat", "second (not in memory)"]
        browser.run("$('model').value = 'second'; $('model').dispatchEvent(new Event('change'))")
        browser.wait_for("document.title === 'second - QSF'")
        assert browser.run("contextTokens") == 0
        browser.run("$('text').focus()")
        browser.type("Hello")
        browser.press("Enter")
        is_done(browser, 2)
        browser.wait_for("contextTokens")
        assert browser.run(options) == ["chat", "second"]
        assert browser.run("document.querySelector('.assistant h2').textContent") == "second"
        browser.show(client.url, DESK, "light")
        browser.wait_for("document.title === 'second - QSF'")
        assert browser.errors == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_times_of_each_token(client: Client, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "A"}
    fields = {**asked, "max_tokens": 6, "stream": True, "ignore_eos": True, "temperature": 0}
    if path == "/completion":
        fields["n_predict"] = fields.pop("max_tokens")
    plain, timed = (
        [event for event in client.post(path, {**fields, **more}).events if event != "[DONE]"]
        for more in ({}, {"timings_per_token": True})
    )
    counts = [event["timings"]["predicted_n"] for event in timed if "timings" in event]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(counts) > 2
    assert sum("timings" in event for event in plain) == (path == "/completion")  # its last one


@pytest.mark.slow
def test_code_is_coloured(client: Client, browser: Browser) -> None:
    browser.show(client.url, DESK, "light")
    spans = "[...markdown(element('div'), %s.split('\\n')).querySelectorAll('code span')]"
    for language, found in {
        "python": ["word:if", 'literal:"a # b"', "comment:# c"],
        "c": ["word:if", 'literal:"a # b"'],
        "text": [],
    }.items():
        text = f'```{language}\nif (x == "a # b") # c'
        script = spans % json.dumps(text) + ".map(e => e.className + ':' + e.textContent)"
        assert browser.run(script) == found, language


@pytest.mark.slow
def test_enter_on_glass_begins_a_line(client: Client, browser: Browser) -> None:
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=5)
    browser.show(client.url, PHONE, "light")
    browser.type("one")
    browser.press("Enter")
    browser.type("two")
    assert browser.run("[$('text').value, messages.length]") == ["one\ntwo", 0]
    browser.run("$('send').click()")
    browser.wait_for("messages[0].content === 'one\\ntwo'")
    is_done(browser, 2)
    assert "seed" not in browser.run("$('speed').textContent")
