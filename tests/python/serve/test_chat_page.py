"""The page at ``/`` in headless Chromium: chat, stop, again, edit, settings; a phone and a desk."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from make.chromium import Browser, find_browser
from make.served import Client, after_passes, serving

PHONE, DESK = (360, 740), (1100, 800)


@pytest.fixture(scope="module")
def client(tiny_chat_8bit: Path) -> Iterator[Client]:
    with serving(tiny_chat_8bit, parallel=2) as found:
        yield found


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


def is_done(browser: Browser, n_cards: int) -> None:
    browser.wait_for(f"!running && document.querySelectorAll('article').length === {n_cards}")


def overflow(browser: Browser) -> Any:
    return browser.run(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('dialog:not([open])') && "
        "!e.closest('.hidden') && e.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map(e => e.tagName + e.id)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
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
    said = client.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Tell me a story"}],
        temperature=0,
        max_tokens=30,
    ).json["choices"][0]["message"]["content"]
    assert texts(browser) == ["Tell me a story", said]
    assert browser.run("$('said').textContent") == f"The answer: {said}"
    assert "tokens/s" in browser.run("$('speed').textContent")
    assert " of 512 tokens" in browser.run("$('used').textContent")
    assert 0 < browser.run("$('context').value") < 1

    browser.run("document.querySelector('[aria-label=\"Write this answer again\"]').click()")
    is_done(browser, 2)
    assert texts(browser) == ["Tell me a story", said]
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
    assert "and 512 is the limit" in browser.run("document.querySelector('.error').textContent")


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
