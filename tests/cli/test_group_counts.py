"""`--groups`: one number, a list, or a file of numbers."""

import json
from pathlib import Path

import pytest

from gqa_convert.cli.convert import group_counts
from gqa_convert.errors import OptionError
from tests.helpers.command_line import run
from tests.helpers.tiny import make_checkpoint

COUNTS = [12, 4, 3, 1]


def test_a_file_of_numbers(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source", head_dim=8, intermediate_size=256, num_hidden_layers=4)
    numbers = tmp_path / "numbers"
    numbers.write_text("12\n4\n3\n\n1\n")
    shown = run("convert", source, "--groups", f"@{numbers}", "-m", "mean", "--dry-run", "--json")
    assert json.loads(shown.stdout)["groups"] == COUNTS
    assert group_counts("12,4,3,1", None) == group_counts(f"@{numbers}", None) == COUNTS
    assert group_counts("4", None) == 4
    numbers.write_text("[12, 4, 3, 1]")
    assert group_counts(f"@{numbers}", None) == COUNTS


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("[12, x]", "'x'"),
        ("[12, true]", "'true'"),
        ("", "integer"),
        ("12\nfew", "'few'"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_of_numbers(content: str | None, word: str, tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"
    if content is not None:
        numbers.write_text(content)
    with pytest.raises(OptionError, match=word):
        group_counts(f"@{numbers}", None)
