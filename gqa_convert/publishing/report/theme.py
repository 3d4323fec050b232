"""Colours: placeholders for matplotlib, and the colours that replace them on a light and on a dark background. The
series also differ in lightness, for colour-blind readers, and in their markers.
"""

import re
from collections.abc import Callable

INK, MUTED, GRID, GROUND, HEAT = "#010101", "#010102", "#010103", "#010104", "#010105"
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
MARKERS = ("o", "s", "^", "D", "v", "P")

_LIGHT = {
    INK: "#1b1f24",
    MUTED: "#57606a",
    GRID: "#d8dee4",
    GROUND: "#ffffff",
    HEAT: "#08306b",
    **dict(zip(SERIES, ("#0072b2", "#c24e00", "#007f5c", "#a8447a", "#806300", "#555b66"), strict=True)),
}
_DARK = {
    INK: "#e6e9ed",
    MUTED: "#9aa4b0",
    GRID: "#333a44",
    GROUND: "#14171c",
    HEAT: "#6baed6",
    **dict(zip(SERIES, ("#56b4e9", "#f08c3c", "#2fc79a", "#e08fc0", "#d9c04a", "#b8bfca"), strict=True)),
}
_NAMES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", GROUND: "--ground", HEAT: "--heat"} | {
    colour: f"--series-{number}" for number, colour in enumerate(SERIES, 1)
}


def variables(*, dark: bool) -> str:
    """The colours as CSS declarations."""
    colours = _DARK if dark else _LIGHT
    return " ".join(f"{name}: {colours[colour]};" for colour, name in _NAMES.items())


def inline(svg: str, prefix: str) -> str:
    """An SVG element for a page: colours are CSS variables, and ids begin with `prefix`, so that those of several
    figures differ.
    """

    def adapt(tag: str) -> str:
        tag = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}--\1"', tag)
        tag = re.sub(r'href="#([^"]*)"', rf'href="#{prefix}--\1"', tag)
        tag = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}--\1)", tag)
        return _COLOUR.sub(lambda match: f"var({_NAMES.get(match[0], match[0])})", tag)

    return _in_tags(svg.replace(">*{", ">svg *{"), adapt)


def standalone(svg: str) -> str:
    """An SVG file for a white background."""
    return _in_tags(svg, lambda tag: _COLOUR.sub(lambda match: _LIGHT.get(match[0], match[0]), tag))


_COLOUR = re.compile("#0101[01][0-9]")


def _in_tags(svg: str, change: Callable[[str], str]) -> str:
    """Change the tags of an SVG and leave its text unchanged, since names may contain anything."""
    return re.sub("<[^>]*>", lambda match: change(match[0]), svg)
