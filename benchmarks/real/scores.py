"""Loss and divergence from the source on held-out text, by position.

The source's log-probabilities are computed once for each window length and kind of text and kept on disk in float16
(98 KB a token at 49,152 words). A result is compared with them a few hundred positions at a time, so that the logits
of a whole block are never in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

UNIT = 512
"""Tokens of text over which standard errors are taken, whatever the window."""
EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096)
"""Where the bins of positions begin."""
_ROWS = 256
"""Positions whose logits are in memory at once."""


@dataclass(frozen=True)
class PositionScore:
    """Means over the positions from `first` to `last`, both included."""

    first: int
    last: int
    loss: float
    kl: float


@dataclass(frozen=True)
class Score:
    """Losses in nats per predicted token; errors are standard errors over units of `UNIT` tokens, None for one unit.

    Attributes:
        tokens: predicted tokens.
        loss: mean loss.
        excess: loss minus that of the source.
        kl: KL(source || model).
        by_position: the same by the position of the predicting token.
    """

    tokens: int
    loss: float
    loss_error: float | None
    excess: float
    excess_error: float | None
    kl: float
    kl_error: float | None
    by_position: tuple[PositionScore, ...]


def position_bins(window: int) -> list[tuple[int, int]]:
    """First and last predicting position of each bin in a window, whose last token predicts nothing."""
    starts = [edge for edge in EDGES if edge < window - 1]
    return [(first, after - 1) for first, after in zip(starts, [*starts[1:], window - 1], strict=True)]


def standard_error(values: npt.NDArray[np.float64]) -> float | None:
    """Of the mean; None for a single value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def units(values: npt.NDArray[np.float64], size: int = UNIT) -> npt.NDArray[np.float64]:
    """Means of consecutive units of text.

    Args:
        values: [b, w - 1], a number for each predicting position of b windows.
        size: tokens of a unit; a window that is not longer is one unit.
    """
    parts = [values[:, first : first + size] for first in range(0, values.shape[1], size)]
    return np.concatenate([part.mean(1) for part in parts])


def summarise(
    losses: npt.NDArray[np.float64], kls: npt.NDArray[np.float64], source_losses: npt.NDArray[np.float64]
) -> Score:
    """The score of b windows of w tokens from numbers of each predicting position, [b, w - 1] each."""
    excess = losses - source_losses
    bins = [
        PositionScore(
            first,
            last,
            round(float(losses[:, first : last + 1].mean()), 4),
            round(float(kls[:, first : last + 1].mean()), 4),
        )
        for first, last in position_bins(losses.shape[1] + 1)
    ]
    means = [round(float(each.mean()), 4) for each in (losses, excess, kls)]
    errors = [
        None if (error := standard_error(units(each))) is None else round(error, 4) for each in (losses, excess, kls)
    ]
    return Score(losses.size, means[0], errors[0], means[1], errors[1], means[2], errors[2], tuple(bins))


def log_probabilities(model: Any, block: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Positions and their log-probabilities [rows, V] in float32; the last position, which predicts nothing, is left
    out.

    Args:
        model: a causal language model in evaluation mode.
        block: token ids [w].
    """
    hidden = model.base_model(input_ids=block[None], use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings()
    for first in range(0, len(block) - 1, _ROWS):
        rows = slice(first, min(first + _ROWS, len(block) - 1))
        yield rows, head(hidden[rows]).float().log_softmax(-1)


class Reference:
    """The source's log-probabilities of some blocks, in a file."""

    def __init__(self, path: Path, load: Callable[[], Any], blocks: torch.Tensor) -> None:
        """
        Args:
            path: of the file; it is written if it does not exist.
            load: returns the source; called only if the file does not exist.
            blocks: token ids [b, w].
        """
        if not path.is_file():
            self._write(path, load(), blocks)
        self._values = np.load(path, mmap_mode="r")

    def _write(self, path: Path, model: Any, blocks: torch.Tensor) -> None:
        partial = path.with_suffix(".partial")
        shape = (len(blocks), blocks.shape[1] - 1, model.config.vocab_size)
        values = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float16, shape=shape)
        with torch.inference_mode():
            for number, block in enumerate(blocks):
                for rows, found in log_probabilities(model, block):
                    values[number, rows] = found.half().numpy()
        values.flush()
        partial.replace(path)

    def read(self, number: int, rows: slice) -> torch.Tensor:
        """Log-probabilities [rows, V] of a block in float32."""
        return torch.from_numpy(self._values[number, rows].astype(np.float32))


def _of_tokens(log_p: torch.Tensor, following: torch.Tensor) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = -log_p.gather(1, following[:, None])[:, 0].double().numpy()
    return found


def score(model: Any, reference: Reference, blocks: torch.Tensor) -> Score:
    """Compare a model with its source.

    Args:
        model: in evaluation mode; None scores the source itself.
        reference: of the same blocks.
        blocks: token ids [b, w].
    """
    shape = (len(blocks), blocks.shape[1] - 1)
    losses, kls, source_losses = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    with torch.inference_mode():
        for number, block in enumerate(blocks):
            if model is None:
                for first in range(0, shape[1], _ROWS):
                    rows = slice(first, min(first + _ROWS, shape[1]))
                    log_p = reference.read(number, rows)
                    losses[number, rows] = source_losses[number, rows] = _of_tokens(log_p, block[1:][rows])
                continue
            for rows, log_q in log_probabilities(model, block):
                log_p = reference.read(number, rows)
                following = block[1:][rows]
                losses[number, rows] = _of_tokens(log_q, following)
                source_losses[number, rows] = _of_tokens(log_p, following)
                kls[number, rows] = (log_p.exp() * (log_p - log_q)).sum(-1).double().numpy()
    return summarise(losses, kls, source_losses)
