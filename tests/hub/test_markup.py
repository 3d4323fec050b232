"""Nothing in a name becomes markup, and numbers have four digits."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from gqa_convert.families.layerwise import heads_text
from gqa_convert.hub.markup import Markdown, code, fenced, render, shell, significant


def test_significant_digits() -> None:
    numbers = (None, 3.2949974, 0.24512, 12.0, 2e-7)
    assert [significant(number) for number in numbers] == ["", "3.295", "0.2451", "12", "2e-07"]
    assert significant(3.0755, 0.1568) == "3.075 ± 0.16"
    assert [significant(2.5, error) for error in (None, 0.0)] == ["2.5", "2.5"]


def test_kv_heads_in_words() -> None:
    assert (heads_text(4), heads_text([2, 8, 3]), heads_text([4, 4])) == ("4", "2 to 8", "4")


def test_bars_and_backticks_end_nothing() -> None:
    assert code("a``b||c") == "`a''b¦¦c`"
    assert code("") == "` `"
    assert fenced(shell(["```", "a\n```"]), "sh") == "```sh\n'```' 'a\\n```'\n```"


def test_a_template_is_rendered_strictly(tmp_path: Path) -> None:
    path = tmp_path / "card.jinja"
    path.write_text("{{ card.text }} {{ card.text | Markdown }}\n")
    assert render(path, {"text": "*"}) == "\\* *\n"
    assert render(path, {"text": Markdown("*")}) == "* *\n"
    for wrong in ({}, {"test": ""}):
        with pytest.raises(UndefinedError):
            render(path, wrong)
