"""The quality report's page, which loads nothing else: its frame and the parts of its sections."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from qsf.page.style import STYLE
from qsf.page.svg import bar, text

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(kind: str, name: str, about: str, main: str, footer: str, *, title: str) -> str:
    """Return the page. ``main`` and ``footer`` are HTML, the others text."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="referrer" content="no-referrer">
<title>{text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<p class="over">{text(kind)}</p>
<h1>{text(name)}</h1>
<p class="sub">{text(about)}</p>
</header>
<main>
{main}
</main>
<footer>{footer}</footer>
</body>
</html>
"""


def section(title: str, note: str, content: str, *, is_long: bool = False, anchor: str = "") -> str:
    """Return a card with a title. ``is_long``: paper may break it; ``anchor``: its id."""
    kind = (f' id="{text(anchor)}"' if anchor else "") + (' class="long"' if is_long else "")
    return (
        f'<section{kind}><h2>{text(title)}</h2><p class="note">{text(note)}</p>{content}</section>'
    )


def figures(boxes: Sequence[tuple[str, str, str]]) -> str:
    """Return the large figures at the top: (name, value, what to know of it)."""
    inner = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(more)}</small></dd></div>"
        for name, value, more in boxes
    )
    return f'<dl class="figures">{inner}</dl>'


def bars(rows: Sequence[tuple[str, float, int, str, str]]) -> str:
    """Return a bar for each (name, fraction of the largest, category, value, more)."""
    return (
        '<dl class="bars">'
        + "".join(
            f'<dt>{text(name)}</dt><dd>{bar(fraction, category)}</dd><dd class="v">{text(value)} '
            f'<span class="soft">{text(more)}</span></dd>'
            for name, fraction, category, value, more in rows
        )
        + "</dl>"
    )


def facts(named: Mapping[str, str]) -> str:
    """Return names and what they are beneath each other; nothing when there are none."""
    rows = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in named.items())
    return f'<dl class="facts">{rows}</dl>' if rows else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: Collection[int]) -> str:
    """Return a table; the columns ``texts`` begin at the left, numbers end at the right."""
    style = [' class="t"' if idx in texts else "" for idx in range(len(heads))]
    head = "".join(
        f'<th scope="col"{cls}>{text(name)}</th>' for name, cls in zip(heads, style, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>'
        + "".join(
            f"<td{cls}>{text(value)}</td>" for value, cls in zip(row[1:], style[1:], strict=True)
        )
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def scroll(label: str, content: str, *, kind: str = "wide") -> str:
    """Wrap what may be wider than the page; a keyboard can scroll it too."""
    attributes = f'class="scroll {kind}" role="region" tabindex="0" aria-label="{text(label)}"'
    return f"<div {attributes}>{content}</div>"
