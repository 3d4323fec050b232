"""Write text for uptraining that asks for what stands far above: made-up statements among
paragraphs of your own text.

    python recipes/made_up_text.py prose.jsonl made-up.jsonl

The questions about a statement, and a part of each paragraph once more, follow 100 to 5,000
characters later. In a recipe, the file stands beside other text:

    data:
      - source: prose.jsonl
        weight: 60
      - source: made-up.jsonl
        weight: 40
"""

import argparse
import heapq
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

from gqa_convert.conversion.calibration.made_up_records import made_up_records
from gqa_convert.data.files import Fields
from gqa_convert.data.sources import as_source, open_source
from gqa_convert.errors import DataError
from gqa_convert.publishing.atomic_files import write_whole

PARAGRAPH = range(100, 500)  # characters, as all sizes here
STATEMENT = 1_500
TEXT = 40_000
NEAREST, FARTHEST = 100, 5_000
STATED_SHARE = 1 / 3  # of statements among statements and paragraphs


def asked_later(seed: int, paragraphs: Sequence[str]) -> Iterator[str]:
    """Texts without end. Near questions and copies are as frequent as far ones."""
    chance = Random(seed)
    documents = made_up_records(seed, STATEMENT, ())
    while True:
        text = ""
        later: list[tuple[float, str]] = []
        while len(text) < TEXT:
            if later and later[0][0] < len(text):
                part = heapq.heappop(later)[1]
            else:
                if chance.random() < STATED_SHARE:
                    part, _, again = next(documents).rstrip().rpartition("\n\n")
                else:
                    part = chance.choice(paragraphs)
                    again = part[chance.randrange(len(part)) :]
                distance = NEAREST * (FARTHEST / NEAREST) ** chance.random()
                heapq.heappush(later, (len(text) + len(part) + distance, again))
            text += f"{part}\n\n"
        yield text


def paragraphs_of(source: str) -> list[str]:
    """The paragraphs of a text that are neither short nor long."""
    texts = [str(piece.text) for piece in open_source(as_source(source)).pieces(Fields())]
    return [part for text in texts for part in text.split("\n\n") if len(part) in PARAGRAPH]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="a file, a folder, a pattern, or python-stdlib")
    parser.add_argument("out", type=Path, help="the file to write, JSON lines")
    parser.add_argument(
        "--texts", type=int, default=250, help="of some 16,000 tokens each; default 250"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.texts < 1:
        parser.error(f"--texts is {options.texts}: expected 1 or more")
    if options.out.exists():
        parser.error(f"{options.out} exists: name another file")
    try:
        paragraphs = paragraphs_of(options.text)
    except DataError as problem:
        parser.error(str(problem))
    if not paragraphs:
        parser.error(
            f"{options.text} has no paragraphs of {PARAGRAPH.start} to {PARAGRAPH.stop} "
            f"characters between empty lines"
        )
    texts = islice(asked_later(options.seed, paragraphs), options.texts)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


if __name__ == "__main__":
    main()
