"""Reads pages of HTML as strictly as no browser does."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from html.parser import HTMLParser


class PageParser(HTMLParser):
    """Reads a page strictly: what is opened is closed, in order; keeps what it met."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def read(self, text: str) -> PageParser:
        self.feed(text)
        self.close()
        assert self.open == []
        return self

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def check_needs_nothing(self, page: str) -> None:
        """Read a page that loads nothing, runs nothing and says so to the browser."""
        self.read(page)
        names = {tag for tag, _ in self.tags}
        loading = {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
        assert names.isdisjoint(loading)
        for word in ("http:", "https:", "//", "url(", "@import", "javascript:", "data:"):
            assert word not in page
        attributes = {name for _, attrs in self.tags for name in attrs}
        assert attributes.isdisjoint({"src", "href", "srcset", "action", "background"})
        assert not any(name.startswith("on") for name in attributes)
        policy = [attrs["content"] for _, attrs in self.tags if attrs.get("http-equiv")]
        assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]

    def handle_data(self, data: str) -> None:
        if data.strip() and "style" not in self.open:
            self.texts.append(data.strip())
