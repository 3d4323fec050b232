"""Calibration on text or pairs, of a checkpoint that need not have weights."""

from pathlib import Path
from typing import Any

from gqa_convert.conversion.calibration.pairs import draw_pairs, find_pairs
from gqa_convert.conversion.calibration.streams import Calibration, Request
from gqa_convert.conversion.calibration.text import draw_text
from gqa_convert.conversion.calibration.texts import open_text
from gqa_convert.conversion.options import each_of


def calibration_batches(
    folder: Path,
    source: Any,
    tokens: int,
    *,
    sequence_length: int | None = None,
    held_out_tokens: int = 0,
    fresh_tokens: int = 0,
    **options: Any,
) -> Calibration:
    """Batches of a text or of a list of them, drawn for a model."""
    sizes = (tokens, held_out_tokens, fresh_tokens)
    request = Request(folder, *sizes, length=sequence_length, **options)
    sources = [open_text(each) for each in each_of(source)]
    pairs = find_pairs(request, sources, None)
    return draw_pairs(request, pairs) if pairs else draw_text(request, sources)
