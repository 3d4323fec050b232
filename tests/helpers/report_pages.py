"""Reads the tables and tags of a report's page."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Tables as text, attributes of all tags, and whether every tag is closed."""

    EMPTY = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words = ""
        self._section = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "section":
            self._section = dict(attrs).get("id") or ""
        if tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        if tag in ("td", "th"):
            self.tables[self._section][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self._section][-1][-1] += data.replace("\xa0", " ")


def page_of(made: dict[str, Any]) -> Page:
    return Page(Path(made["html"]).read_text(encoding="utf-8"))


def rows_of(page: Page, name: str) -> list[dict[str, str]]:
    header, *rows = page.tables[f"table-{name}"]
    return [dict(zip(header, row, strict=True)) for row in rows]
