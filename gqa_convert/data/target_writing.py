"""Targets that an encoder-decoder writes itself, for calibration on inputs whose outputs are not at hand: generated once
into the cache, as a decoder's own text is (`text_generation`).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.data.documents import Fields
from gqa_convert.data.order import mix, permuted
from gqa_convert.data.pairs import refuse_languages
from gqa_convert.data.sources import TextSource
from gqa_convert.data.text_generation import OwnText
from gqa_convert.families import loading
from gqa_convert.families.context_length import block_length
from gqa_convert.publishing.atomic_files import write_whole
from gqa_convert.runtime.machine import multiplies_bfloat16
from gqa_convert.runtime.paths import local_path

LONGEST = 256
"""The most tokens of a target."""
BATCH = 16
"""The inputs that are answered at once."""


def written_targets(
    checkpoint: Checkpoint,
    text: TextSource,
    field: str,
    cache: Path,
    *,
    tokens: int,
    seed: int,
    device: str,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> OwnText:
    """Pairs of inputs and of what a checkpoint writes for them by greedy search, unless the cache has them.

    Args:
        checkpoint: of an encoder-decoder, in a local folder.
        text: rows with inputs.
        field: that holds them.
        cache: the folder of the file.
        tokens: of both texts together, after which no more is written.
        seed: of the order in which inputs are taken from a file; a Hub dataset is read from its beginning.
        device: such as `cpu` or `cuda`.
        progress: called with the tokens that there are and those wanted.

    Raises:
        DataError: the text can't be read, or the tokenizer marks languages.
    """
    folder = checkpoint.local_folder
    settings: list[Any] = [LONGEST, BATCH, seed, tokens, text.identity(), field]
    for path in sorted(folder.iterdir()):
        settings += [str(path), path.stat().st_size, path.stat().st_mtime_ns]
    file = (
        cache
        / f"targets-{hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:32]}.jsonl"
    )
    name = local_path(checkpoint.source_id).name
    label = f"{text.label} with targets that {name} writes"
    if not file.is_file():
        with loading.explained(checkpoint.source_id), loading.no_bars():
            writer = _Writer(checkpoint, device)
        rows: list[dict[str, str]] = []
        inputs, done = iter(_inputs(text, field, seed)), 0
        while done < tokens and (group := list(islice(inputs, BATCH))):
            written, size = writer.answers(group)
            rows += [
                {"source": source, "target": target}
                for source, target in zip(group, written, strict=True)
            ]
            done += size
            progress(min(done, tokens), tokens)
        cache.mkdir(parents=True, exist_ok=True)
        write_whole(
            file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        )
    return OwnText(file, label)


def _inputs(text: TextSource, field: str, seed: int) -> Iterable[str]:
    """Inputs that hold text, those of a file in random order."""
    found = (piece.text for piece in text.pieces(Fields((field,))) if piece.text.strip())
    if text.is_stream:
        return found
    listed = list(found)
    return [listed[permuted(place, len(listed), mix(seed, 7))] for place in range(len(listed))]


class _Writer:
    """A loaded encoder-decoder with its tokenizer."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        import torch

        folder = checkpoint.local_folder
        self._tokenizer = loading.load_tokenizer(folder)
        refuse_languages(self._tokenizer)
        self._longest = block_length(checkpoint.config)
        dtype = torch.bfloat16 if multiplies_bfloat16(torch.device(device)) else torch.float32
        model, _ = loading.load_model(folder, dtype)
        self._model = model.to(device).eval()

    def answers(self, inputs: Sequence[str]) -> tuple[list[str], int]:
        """What the model writes for each input, and the tokens of both."""
        import torch

        read = self._tokenizer(
            inputs, padding=True, truncation=True, max_length=self._longest, return_tensors="pt"
        ).to(self._model.device)
        options = {"num_beams": 1, "do_sample": False, "max_new_tokens": LONGEST}
        with torch.inference_mode(), loading.no_warnings():
            made = self._model.generate(**read, **options)
        texts: list[str] = self._tokenizer.batch_decode(made, skip_special_tokens=True)
        written = sum(len(ids) for ids in self._tokenizer(texts)["input_ids"])
        return texts, int(read["attention_mask"].sum()) + written
