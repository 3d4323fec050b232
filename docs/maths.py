"""A hook of mkdocs: formulas as MathML, which browsers draw without scripts or fonts of their own;
GitHub reads the same notation.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replaces what the extension arithmatex has found."""
    return _FORMULA.sub(
        lambda found: convert(
            html.unescape(found[2]), display="inline" if found[1] == "span" else "block"
        ),
        content,
    )
