"""The script that writes made-up text for uptraining."""

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "made_up_text.py"
PARAGRAPHS = [f"Paragraph {number}: " + f"zyx{number} " * 20 for number in range(400)]


def test_questions_and_copies_follow_what_they_ask_for() -> None:
    asked_later: Callable[[int, list[str]], Iterator[str]] = runpy.run_path(str(SCRIPT))[
        "asked_later"
    ]
    text = next(asked_later(0, PARAGRAPHS))
    assert len(text) >= 40_000
    parts = re.split("\n\n+", text.strip("\n"))
    copies = [
        (at, part) for at, part in enumerate(parts) if "zyx" in part and part not in PARAGRAPHS
    ]
    assert len(copies) > 10
    for at, part in copies:
        assert any(earlier.endswith(part) for earlier in parts[:at])
    asked = [
        (at, part.splitlines()) for at, part in enumerate(parts) if part.startswith("What is the ")
    ]
    assert asked
    for at, lines in asked:
        above = "\n".join(parts[:at])
        assert all(answer in above for answer in lines[1::2])


def test_a_file_is_written_and_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source, out = tmp_path / "prose.txt", tmp_path / "new" / "made-up.jsonl"
    source.write_text("\n\n".join(PARAGRAPHS), "utf-8")
    monkeypatch.setattr("sys.argv", ["made_up_text.py", str(source), str(out), "--texts", "2"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(rows) == 2
    written = out.read_bytes()
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "name another file" in capsys.readouterr().err
    assert out.read_bytes() == written
    source.write_text("short", "utf-8")
    out.unlink()
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "no paragraphs" in capsys.readouterr().err
    assert not out.exists()
