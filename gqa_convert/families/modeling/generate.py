"""Writes the functions of `shared.py` into every modelling file of this folder.

python -m gqa_convert.families.modeling.generate           # write
python -m gqa_convert.families.modeling.generate --check   # exit 1 if a file is out of date
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
BEGIN = "# Shared part: begin"
END = "# Shared part: end"


def shared_part(text: str, name: str) -> tuple[int, int]:
    """Where the shared part of a file begins and ends.

    Raises:
        ValueError: the file lacks a marker.
    """
    begin, end = text.find(f"\n{BEGIN}"), text.find(f"\n{END}")
    if not 0 <= begin < end:
        raise ValueError(f"{name} lacks the lines {BEGIN!r} and {END!r}: add them behind its imports")
    return text.index("\n", begin + 1) + 1, end + 1


def generated(path: Path) -> str:
    """The text of a modelling file with the current functions of `shared.py`; unchanged if the file has no place for
    them.
    """
    shared = (FOLDER / "shared.py").read_text(encoding="utf-8")
    source = slice(*shared_part(shared, "shared.py"))
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text and END not in text:
        return text
    begin, end = shared_part(text, path.name)
    return text[:begin] + shared[source] + text[end:]


def modelling_files() -> list[Path]:
    """The files that travel with checkpoints."""
    return sorted(FOLDER.glob("gqa_*.py"))


def main(arguments: list[str]) -> int:
    """Write the files, or compare them with `--check`; returns the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m gqa_convert.families.modeling.generate [--check]", file=sys.stderr)
        return 2
    stale = [path for path in modelling_files() if path.read_text(encoding="utf-8") != generated(path)]
    for path in stale:
        if arguments:
            print(
                f"{path.name} differs from shared.py: run python -m gqa_convert.families.modeling.generate",
                file=sys.stderr,
            )
        else:
            path.write_text(generated(path), encoding="utf-8")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
