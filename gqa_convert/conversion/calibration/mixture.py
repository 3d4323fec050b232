"""What is mixed into the user's calibration text, so that the result keeps what this text does not
show.

`fit` keeps the source's behaviour on the kind of text that it sees, and loses it elsewhere:
calibrated on English prose alone, SmolLM2-135M from 3 K/V heads to 1 diverges by 0.95 nats per
token on code, and by 0.46 where other kinds were mixed in (docs/results/README.md). A quarter of
the blocks therefore comes from

- the source itself, which samples documents and, where it has a chat template, conversations (Liu
  et al. 2023, LLM-QAT; conversations as Xu et al. 2024, Magpie, section 2);
- the sources of the Python standard library;
- made-up records, with questions about them (`made_up_records`).
"""

import math

from gqa_convert.data.sources import STDLIB
from gqa_convert.errors import DataError

from .blocks import Text
from .made_up_records import record_blocks
from .own_text import Kind, OwnWriter, first_texts, has_chat_template, with_spare
from .streams import Request
from .texts import OpenText, TextReader, open_text

OWN_SHARE = 0.10
"""Of all blocks, half of them conversations where the source writes any."""
CODE_SHARE = 0.08
RECORDS_SHARE = 0.07
MOST = OWN_SHARE + CODE_SHARE + RECORDS_SHARE
_PARAGRAPH = range(100, 500)
"""Characters of the source's own text among which facts are scattered."""


def mix_in(
    request: Request, reader: TextReader, held: int, writer: OwnWriter | None, *, code: bool
) -> tuple[list[Text], list[str]]:
    """What is mixed into the user's texts.

    Args:
        request: what is asked for.
        reader: of texts.
        held: the tokens that the user's texts hold.
        writer: of the source; None where it writes nothing.
        code: whether to mix in Python sources.

    Returns:
        The texts with their shares of all blocks, and sentences on what could not be mixed in.
    """
    # Let the source write, and take paragraphs of that for the records.
    own: dict[Kind, OpenText] = {}
    refused: list[str] = []
    if writer is not None:
        wanted = OWN_SHARE * min(request.tokens, held / (1 - MOST))
        own, refused = _written(reader, writer, wanted)
    filler: list[str] = []
    documents = first_texts(own["text"]) if "text" in own else []
    for document in documents:
        filler += [part for part in document.split("\n\n") if len(part) in _PARAGRAPH]

    # Read the texts.
    added: list[Text] = []
    for kind, opened in own.items():
        share = OWN_SHARE / len(own)
        added.append(Text(f"{kind} of its own", reader.read(opened), share, is_sampled=True))
    if code:
        added.append(Text("Python sources", reader.read(open_text(STDLIB)), CODE_SHARE))

    # Take no more blocks than the shares of what the user's texts hold.
    shares = [*(text.share for text in added), RECORDS_SHARE]
    left = 1 - sum(shares)
    block = reader.form.raw
    *most, records = [int(share * held / left) // block for share in shares]
    for number, text in enumerate(added):
        added[number] = text._replace(tokens=text.tokens[: most[number] * block])

    # Make up records.
    count = min(records, math.ceil(RECORDS_SHARE * sum(reader.counts)))
    tokens = record_blocks(reader.tokenizer, block, count, request.seed, filler)
    made_up = Text(
        "made-up records", tokens, RECORDS_SHARE, can_be_copied_into=False, is_sampled=True
    )
    return [*added, made_up], refused


def _written(
    reader: TextReader, writer: OwnWriter, tokens: float
) -> tuple[dict[Kind, OpenText], list[str]]:
    """Documents, and as much of conversations where the source has a chat template.

    Args:
        reader: of texts.
        writer: of the source.
        tokens: of both together.

    Returns:
        The texts, documents first, and sentences on those that it can't write.
    """
    written: list[tuple[Kind, OpenText]] = []
    refused = []
    kinds: tuple[Kind, ...] = ("conversations", "text")
    for kind in kinds if has_chat_template(reader.tokenizer) else kinds[1:]:
        # documents take the place of conversations that it does not write
        is_half = written or kind == "conversations"
        wanted = with_spare(tokens / 2 if is_half else tokens)
        try:
            written.append((kind, writer.write(wanted, kind)))
        except DataError as problem:
            refused.append(
                f"{kind} of the source's own among the calibration text, because {problem}"
            )
    return dict(reversed(written)), refused
