"""Running text as calibration: from what the user named to batches of blocks from all parts of it.

The blocks are those that uptraining would train on: concatenated documents, each closed by
end-of-text, with T5's span corruption for encoder-decoders that have sentinel tokens. Other
encoder-decoders read a block and predict the same block, as in denoising without noise.
"""

from collections.abc import Sequence

from gqa_convert.conversion.options import BATCH_TOKENS
from gqa_convert.data.folders import source_files
from gqa_convert.data.model_tokenizer import check_vocabulary, usable_tokenizer
from gqa_convert.data.sources import STDLIB
from gqa_convert.errors import DataError
from gqa_convert.families.loading import read_config

from .blocks import WORDS, Text, batches_of, block_form, draw_blocks
from .mixture import mix_in
from .own_text import OwnWriter, with_spare
from .streams import Calibration, Request, digest_of, largest_token, shortage
from .texts import OpenText, TextReader

_LEAST = 64
"""Tokens of calibration text; with fewer, anything fits."""


def draw_text(
    request: Request,
    sources: Sequence[OpenText | None],
    writer: OwnWriter | None = None,
    *,
    mixes: bool = False,
    mixes_own: bool = False,
) -> Calibration:
    """Draw blocks from whole texts without replacement; a text with no more tokens is used in full.

    Args:
        request: what is asked for.
        sources: the user's texts, from which blocks are drawn in turn; None for what the source
            writes itself. Where one has too little text, the others contribute more.
        writer: of the source's own text.
        mixes: whether other kinds of text are mixed in.
        mixes_own: whether the source writes some of them.

    Raises:
        OptionError: the block length is out of range, or the source can't write.
        DataError: the text or the tokenizer can't be read or does not fit the model, or a text has
            fewer than 64 tokens.
    """
    config = read_config(request.folder)
    tokenizer = usable_tokenizer(request.folder)
    form = block_form(request, config, tokenizer)
    counts = [-(-n // form.raw) for n in (request.fitted, request.held_out, request.fresh)]

    # Read the texts that the user named, and what is mixed in.
    reader = TextReader(tokenizer, form, counts)
    users = _read(request, reader, sources, writer)
    added: list[Text] = []
    left_out: list[str] = []
    if mixes:
        held = sum(len(text.tokens) for text in users)
        code = all(text.label != STDLIB for text in users) and bool(source_files(held_out=False))
        own = writer if mixes_own and None not in sources else None
        added, left_out = mix_in(request, reader, held, own, code=code)
    left = 1 - sum(text.share for text in added)
    texts = [*(text._replace(share=left / len(users)) for text in users), *added]

    # Draw blocks from all of them, and make batches.
    parts = draw_blocks(texts, form.raw, counts, request.seed)
    fitted, held_out, fresh = (
        batches_of(part, form, request.context, request.seed) for part in parts
    )
    check_vocabulary(config, largest_token(fitted), request.folder)

    # Say what they are.
    label = " and ".join(text.label for text in users)
    used = sum(len(block.tokens) for block in parts[0])
    length = fitted[0]["input_ids"].shape[1]
    shortest = fitted[-1]["input_ids"].shape[1]
    blocks = "1 block" if len(parts[0]) == 1 else f"{len(parts[0])} blocks"
    blocks += f" of {length}" if shortest == length else f" of up to {length}"
    stretching = ""
    if "position_ids" in fitted[0]:
        stretching = f", every second one stretched to {request.context} positions"
    mixed_in = ", ".join(f"{text.share:.0%} {text.label}" for text in added)
    described = (
        f"{used} tokens of {label}: {blocks} {WORDS[form.kind]}{stretching}, seed {request.seed}"
    )
    settings = [form.kind, form.length, request.context, request.seed, BATCH_TOKENS, request.fitted]
    return Calibration(
        batches=fitted,
        tokens=used,
        digest=digest_of(settings, fitted),
        description=f"{described}; mixed in: {mixed_in}" if added else described,
        label=f"{label} and what is mixed in" if added else label,
        warning=shortage(label, used, request, "text"),
        mixed_in=mixed_in,
        left_out=tuple(left_out),
        held_out=held_out,
        fresh=fresh,
    )


def _read(
    request: Request,
    reader: TextReader,
    sources: Sequence[OpenText | None],
    writer: OwnWriter | None,
) -> list[Text]:
    """The user's texts. What the source writes comes last, as much as the others lack.

    Raises:
        DataError: a text can't be read or is too short.
    """
    found: dict[int, Text] = {}
    used = request.fitted + request.held_out
    for number in sorted(range(len(sources)), key=lambda number: sources[number] is None):
        opened = sources[number]
        if opened is None:
            assert writer is not None
            lacking = used - sum(len(text.tokens) for text in found.values())
            opened = writer.write(with_spare(max(used / len(sources), lacking)))
        found[number] = Text(opened.label, reader.read(opened))
        if (count := len(found[number].tokens)) < _LEAST:
            raise DataError(
                f"{opened.label} holds {count} tokens, calibration needs at least {_LEAST}, "
                "and thousands to be of use: name more text"
            )
    return [found[number] for number in range(len(sources))]
