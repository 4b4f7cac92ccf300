"""The HTML report of `qsf.bench` in headless Chromium: on a phone and a desk, light and dark."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import html
import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from make.bench_results import full_results
from qsf.bench.judge.compare import Change, Comparison
from qsf.bench.show.page import page

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
PHONE, DESK = (360, 800), (1280, 900)
BACKGROUND = {"light": (0xFA, 0xF9, 0xF6), "dark": (0x13, 0x15, 0x18)}  # --page of the style
SECTIONS = (
    *("failed", "changes", "rows", "ratios", "bits", "memory", "cgroup", "depth"),
    *("time", "files", "limits", "notes", "method"),
)
# Writes what the browser made of the page into its title: widths, what sticks out beside boxes
# that scroll, and texts of plots that lie on each other (turned ones are left out).
MEASURE = """<script>
addEventListener("load", () => {
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
  const plots = [...document.querySelectorAll("svg.plot")].map(e => Math.round(box(e).width));
  const letter = Math.min(...[...document.querySelectorAll("svg.plot text")].map(
    e => box(e).height).filter(h => h > 0));
  parent.document.title = JSON.stringify({wide, laid, nTexts, sections, plots, letter,
    inner: innerWidth, scroll: document.documentElement.scrollWidth,
    height: document.documentElement.scrollHeight});
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("Chromium is missing: tools/bootstrap.sh page")
        pytest.skip("needs Chromium: tools/bootstrap.sh page")
    return found


@pytest.fixture(scope="module")
def full_page() -> str:
    change = Change("1.1B, qsf, 4bit, tg128", 33.1, 34.2, 0.034, 0.03, "faster", is_relative=True)
    return page(full_results(), Comparison([change], ["Measured on another day."]))


def run(
    browser: str, folder: Path, content: str, size: tuple[int, int], scheme: str, *more: str
) -> str:
    """What the browser prints, opening a page of this content."""
    source = folder / "page.html"
    source.write_text(content, "utf-8")
    arguments = [
        *(browser, *FLAGS, f"--user-data-dir={folder / 'profile'}"),
        f"--window-size={size[0]},{size[1]}",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        *(*more, source.as_uri()),
    ]
    done = subprocess.run(arguments, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")[-2000:]
    return done.stdout.decode("utf-8")


def read_png(path: Path) -> tuple[tuple[int, int], tuple[int, ...], int]:
    """Return the size, the colour of the first pixel, and how many lines differ.

    Lines are those before a PNG's filters are undone: of a blank page all are the same, and the
    first pixel has nothing before it that a filter could take off.
    """
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, n_bits, colour_type = struct.unpack_from(">IIBB", content, 16)
    assert n_bits == 8
    n_channels = {2: 3, 6: 4}[colour_type]
    place, packed = 8, b""
    while place < len(content):
        (n_bytes,) = struct.unpack_from(">I", content, place)
        if content[place + 4 : place + 8] == b"IDAT":
            packed += content[place + 8 : place + 8 + n_bytes]
        place += 12 + n_bytes
    raw = zlib.decompress(packed)
    stride = 1 + width * n_channels
    assert len(raw) == height * stride
    lines = {raw[start : start + stride] for start in range(0, len(raw), stride)}
    return (width, height), tuple(raw[1:4]), len(lines)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_a_browser_shows_the_page(
    browser: str, full_page: str, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    shot = tmp_path / "page.png"
    run(browser, tmp_path, full_page, size, scheme, f"--screenshot={shot}")
    found_size, background, n_lines = read_png(shot)
    assert found_size == size
    assert background == BACKGROUND[scheme]
    assert n_lines > size[1] // 4


def measured(browser: str, folder: Path, content: str, size: tuple[int, int]) -> dict[str, Any]:
    """What `MEASURE` says of the page; its policy, which allows no script, is taken out.

    The page is in a frame: a window of Chromium is never as narrow as a phone.
    """
    open_page, n_policies = re.subn(r'<meta http-equiv="[^>]*>', "", content)
    assert n_policies == 1
    framed = html.escape(open_page.replace("</body>", f"{MEASURE}</body>"))
    style = f"border:0;width:{size[0]}px;height:{size[1]}px"
    outside = f'<!doctype html><title>-</title><iframe style="{style}" srcdoc="{framed}"></iframe>'
    made = run(browser, folder, outside, DESK, "light", "--dump-dom")
    title = re.search(r"<title>(\{.*?\})</title>", made)
    assert title, made[:500]
    said: dict[str, Any] = json.loads(title[1].replace("&amp;", "&"))
    return said


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_everything_has_its_place(
    browser: str, full_page: str, tmp_path: Path, size: tuple[int, int]
) -> None:
    said = measured(browser, tmp_path, full_page, size)
    assert said["inner"] == size[0]
    assert said["scroll"] == size[0]
    assert said["wide"] == []
    assert said["nTexts"] > 50
    assert said["laid"] == []
    assert said["letter"] >= 11  # pixels of a line in plots
    assert [name for name, _, _ in said["sections"]] == list(SECTIONS)
    for name, width, height in said["sections"]:
        assert width > 300, name
        assert height > 60, name
    assert len(said["plots"]) == 6
    assert min(said["plots"]) > 280
    assert said["height"] < 16_000


def test_the_measurement_finds_what_sticks_out(
    browser: str, full_page: str, tmp_path: Path
) -> None:
    """Of the two above: that they can fail."""
    broken = full_page.replace("<main>", '<main><p style="width:1400px">wide</p>', 1)
    broken = broken.replace('y="12">tok/s', 'y="31">tok/s tok/s tok/s', 1)
    said = measured(browser, tmp_path, broken, PHONE)
    assert said["scroll"] == 1400 + 14
    assert said["wide"] == ["P wide"]
    assert said["laid"][0] == "tok/s tok/s tok/s / 1,000"
