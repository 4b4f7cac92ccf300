"""The HTML report of `qsf.bench` in headless Chromium: on a phone and a desk, light and dark."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from make.bench_results import COMPARISON, full_results
from make.chromium import Browser, find_browser
from make.drawn_pages import SECTIONS
from qsf.bench.show.page import page

pytestmark = pytest.mark.slow

PHONE, DESK = (360, 800), (1280, 900)
BACKGROUND = {"light": "rgb(250, 249, 246)", "dark": "rgb(19, 21, 24)"}  # --page of the style
# What the browser made of the page: widths, what sticks out beside boxes that scroll, and texts of
# plots that lie on each other (turned ones are left out).
MEASURE = """(() => {
  const box = element => element.getBoundingClientRect();
  const wide = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll")
    && box(e).right > innerWidth + 0.5).map(e => e.tagName + " " + e.textContent.slice(0, 40));
  const laid = [];
  let nTexts = 0;
  for (const plot of document.querySelectorAll("svg.plot")) {
    const texts = [...plot.querySelectorAll("text:not([transform])")];
    nTexts += texts.length;
    texts.forEach((one, idx) => texts.slice(idx + 1).forEach(other => {
      const a = box(one), b = box(other);
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) laid.push(one.textContent + " / " + other.textContent);
    }));
  }
  const sections = [...document.querySelectorAll("section")].map(
    e => [e.id, Math.round(box(e).width), Math.round(box(e).height)]);
  const letter = Math.min(...[...document.querySelectorAll("svg.plot text")].map(
    e => box(e).height).filter(h => h > 0));
  return {wide, laid, nTexts, sections, letter, scroll: document.documentElement.scrollWidth,
    nPlots: document.querySelectorAll("svg.plot").length,
    background: getComputedStyle(document.body).backgroundColor};
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = find_browser()
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Chromium is missing: tools/bootstrap.sh page")
        pytest.skip("needs Chromium: tools/bootstrap.sh page")
    with Browser(found, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def measured(
    browser: Browser, folder: Path, content: str, size: tuple[int, int], scheme: str = "light"
) -> dict[str, Any]:
    """Return what `MEASURE` says of a page of this content."""
    path = folder / "page.html"
    path.write_text(content, "utf-8")
    browser.show(path.as_uri(), size, scheme)
    found: dict[str, Any] = browser.run(MEASURE)
    return found


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")])
def test_everything_has_its_place(
    browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    said = measured(browser, tmp_path, page(full_results(), COMPARISON), size, scheme)
    assert said["background"] == BACKGROUND[scheme]
    assert said["scroll"] == size[0]
    assert said["wide"] == []
    assert said["nTexts"] > 50
    assert said["laid"] == []
    assert said["letter"] >= 11  # pixels of a line in plots
    assert [name for name, _, _ in said["sections"]] == list(SECTIONS)
    for name, width, height in said["sections"]:
        assert width > 300, name
        assert height > 60, name
    assert said["nPlots"] == 6
    assert browser.errors == []


def test_the_measurement_finds_what_sticks_out(browser: Browser, tmp_path: Path) -> None:
    """Of the one above: that it can fail."""
    broken = page(full_results()).replace("<main>", '<main><p style="width:1400px">wide</p>', 1)
    broken = broken.replace('y="12">tok/s', 'y="31">tok/s tok/s tok/s', 1)
    said = measured(browser, tmp_path, broken, PHONE)
    assert said["scroll"] >= 1400
    assert said["wide"] == ["P wide"]
    assert said["laid"]
