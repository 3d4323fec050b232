"""Nothing in a name becomes markup, and numbers have as many digits as their error allows."""

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from gqa_convert.hub.markup import Markdown, cell, code, fenced, in_words, plain, render, significant, with_error


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (0.0, "0.000"),
        (3.2949974, "3.295"),
        (0.24512, "0.2451"),
        (61.7, "61.70"),
        (123456.7, "123,457"),
        (-0.5, "-0.5000"),
        (0.0000012, "0.00000"),
        (float("nan"), "nan"),
    ],
)
def test_significant_digits(value: float | None, shown: str) -> None:
    assert significant(value) == shown


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (3.0755, 0.1568, "3.08 ± 0.16"),
        (0.125, 0.0078, "0.1250 ± 0.0078"),
        (2.5, None, "2.500"),
        (2.5, 0.0, "2.500"),
        (None, 0.1, ""),
    ],
)
def test_errors_limit_the_digits(value: float | None, error: float | None, shown: str) -> None:
    assert with_error(value, error) == shown


def test_kv_heads_in_words() -> None:
    assert (in_words(4), in_words([2, 8, 3])) == ("4", "2 to 8 (mean 4.33)")


def test_bars_and_backticks_end_nothing() -> None:
    assert code("a``b") == "```a``b```"
    assert code("`") == "`` ` ``"
    assert code("") == "`  `"
    assert fenced("x\n````\ny", "sh") == "`````sh\nx\n````\ny\n`````"
    for text in ("|", r"\|", r"\\|", r"\\\|", "a||b"):
        assert len(re.findall(r"(?:\\.|[^|\\])+", cell(text))) == 1, text  # as cmark-gfm reads a row


def test_paths_lose_their_folders_and_long_texts_their_end() -> None:
    assert plain("in /home/jane/x y, https://a.b/c and ~jane/z") == "in x y, https://a.b/c and z"
    assert code("x" * 601) == f"`{'x' * 600}...`"
    assert plain("a\u202e<b>\n*") == r"a\\u202e&lt;b&gt;\\n\*"


def test_a_template_is_rendered_strictly(tmp_path: Path) -> None:
    path = tmp_path / "card.jinja"
    path.write_text("{{ card.text }} {{ card.text | Markdown }}\n")
    assert render(path, {"text": "*"}) == "\\* *\n"
    assert render(path, {"text": Markdown("*")}) == "* *\n"
    for wrong in ({}, {"test": ""}):
        with pytest.raises(UndefinedError):
            render(path, wrong)
