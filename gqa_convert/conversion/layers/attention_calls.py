"""Batches of a model's inputs, and the calls of an attention module on them, which can be repeated
with any weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gqa_convert.conversion.calibration.streams import Batch, rows_between, tokens_of
from gqa_convert.conversion.options import BATCH_TOKENS
from gqa_convert.processes import count, rank

_STATES = ("key_value_states", "encoder_hidden_states")
"""Keyword arguments for the states that keys and values are projected from, in cross-attention."""
_TOKENS_TOGETHER = 512
"""Of short sequences that are run together."""
_BEGINNINGS = 0.06
"""How many of a text's tokens are also read as the beginning of a block."""
MASSIVE = 5.0
"""How many times as long as their median a state is that counts as massive (Sun et al. 2024,
section 2).
"""


def parts_of(batch: Batch) -> list[Batch]:
    """A batch in parts of one sequence, or of some short ones."""
    length = max(tensor.shape[1] for tensor in batch.values() if not tensor.is_floating_point())
    together = max(1, _TOKENS_TOGETHER // length)
    return [
        rows_between(batch, row, row + together)
        for row in range(0, len(tokens_of(batch)), together)
    ]


def own_rows(batches: Sequence[Batch]) -> dict[int, Batch]:
    """The rows that this process reads, by the numbers of their batches: of all rows, every one in
    as many as there are processes.
    """
    found: dict[int, Batch] = {}
    before, every = 0, count()
    for number, batch in enumerate(batches):
        rows = len(tokens_of(batch))
        # the first of this process's rows in the batch
        first = (rank() - before) % every
        if first < rows:
            found[number] = {name: tensor[first::every] for name, tensor in batch.items()}
        before += rows
    return found


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of an attention module: B sequences of L positions, d numbers each, none of them
    padding.

    Attributes:
        hidden: [B, L, d], the states that queries are projected from: the first argument.
        output: [B, L, d], the contribution to the residual stream that the source's weights yield.
        target: [B, L, d], the contribution that would bring the residual stream to the source's.
        weights: [B, L], how much an error counts at each position; on the model's device, where the
            other three need not be.
        number: of the batch.
        all_rows: B, of the batch in all processes.
    """

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    target: Tensor
    weights: Tensor
    number: int
    all_rows: int

    @property
    def all_numbers(self) -> int:
        """How many numbers the output has in all processes."""
        numbers: int = self.output[0].numel() * self.all_rows
        return numbers

    @property
    def states(self) -> Tensor:
        """[B, S, d], the states that keys and values are projected from: `hidden`, or an encoder's
        output.
        """
        named = map(self.kwargs.get, _STATES)
        return next((states for states in named if isinstance(states, Tensor)), self.hidden)

    def between(self, share: float) -> Tensor:
        """[B, L, d], float32, from `output` at a share of 0 to `target` at 1."""
        return self.output.float().lerp(self.target.float(), share)

    def squared(self, tensor: Tensor) -> Tensor:
        """The weighted sum of squares of [B, L, d], of rows in float32, of all in float64."""
        return (tensor.float().square().sum(-1).double() * self.weights).sum()


def here(calls: Iterable[AttentionCall]) -> Iterator[AttentionCall]:
    """Calls with all of their tensors on the model's device, one at a time."""
    for call in calls:
        device = call.weights.device
        moved = {name: getattr(call, name).to(device) for name in ("hidden", "output", "target")}
        yield replace(call, **moved)


def beginnings(batches: Sequence[Batch], text: Sequence[Batch]) -> list[Batch]:
    """Blocks that hold nothing but their beginning: evenly spread tokens of a text, each by itself,
    or behind the token with which all of its blocks begin.

    To the first token of a block most heads of all later positions attend, as to a sink (Xiao et
    al. 2023, section 3), and some models give it a massive state. A text of a few dozen blocks
    shows a few dozen first tokens.

    Args:
        batches: whose tokens are read.
        text: all batches, which tell whether blocks begin with one token.

    Returns:
        Batches of these blocks; none for an encoder-decoder, whose decoder always begins with the
        same token.
    """
    if not batches or "decoder_input_ids" in batches[0]:
        return []
    # evenly spread tokens
    tokens = torch.cat([batch["input_ids"].flatten() for batch in batches])
    places = torch.linspace(0, len(tokens) - 1, max(1, int(_BEGINNINGS * len(tokens)))).long()
    rows = tokens[places][:, None]
    # behind the one with which all blocks begin
    first = torch.cat([batch["input_ids"][:, 0] for batch in text])
    if len(first) > 1 and (first == first[0]).all():
        rows = torch.cat([first[:1].expand(len(rows), 1), rows], dim=1)
    return [{"input_ids": part} for part in rows.split(BATCH_TOKENS // rows.shape[1])]


@dataclass(slots=True)
class CapturedAttention:
    """An attention module with its calls on every batch, which `run` makes again.

    Attributes:
        name: in the checkpoint.
        projection: the name of the output projection inside the module.
        calls: on what this process reads, in the order of the batches.
        batches: how many there are in all processes.
    """

    name: str
    module: Any
    projection: str
    calls: Sequence[AttentionCall]
    batches: int

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Make a call again, with the weights that the module has now.

        Args:
            call: one of `calls`.

        Returns:
            The contribution [B, L, d], and the input of the output projection [B, L, heads *
            head_dim].
        """
        seen: list[Tensor] = []
        projection = self.module.get_submodule(self.projection)
        with projection.register_forward_hook(
            lambda _, args, output: seen.extend((output, args[0]))
        ):
            self.module(call.hidden, *call.args, **call.kwargs)
        contribution, entered = seen
        sizes = call.hidden.shape[:-1]
        return contribution.reshape(*sizes, -1), entered.reshape(*sizes, -1)
