"""The logits of some rows of a batch at a time: those of a whole batch are its largest tensor by far."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_TRIED = 8
"""Tokens on which a model is tried."""

Rows = Callable[[Tensor], Tensor]
"""The logits [r, V] of rows [r]."""


class OutputHead:
    """Runs a model up to its output projection, and the projection for the rows that are asked for.

    A model that does more than to project, as Gemma 2 caps its logits, is run as a whole. Whether it does is tried on the
    first batch.

    Args:
        model: a transformers model with a language-model head, in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        self._projects: bool | None = None if self._head is not None else False

    def rows(self, inputs: dict[str, Tensor]) -> Rows:
        """Run a batch.

        Args:
            inputs: arguments of the model, [b, L] each.

        Returns:
            The function from indices of rows, of b * L, to their logits.
        """
        inputs = {name: tensor.to(self._model.device) for name, tensor in inputs.items()}
        if self._projects is None:
            self._projects = self._tried({name: tensor[:1, :_TRIED] for name, tensor in inputs.items()})
        if not self._projects:
            logits: Tensor = self._run(inputs).flatten(0, 1)
            return lambda rows: logits[rows.to(logits.device)]
        with self._one_position() as caught:
            self._run(inputs)
        states = caught[0].flatten(0, 1)
        return lambda rows: self._head(states[rows.to(states.device)])

    def _run(self, inputs: dict[str, Tensor]) -> Tensor:
        return self._model(**inputs, use_cache=False).logits

    @contextmanager
    def _one_position(self) -> Iterator[list[Tensor]]:
        """A context in which the head sees the first position alone, and its inputs are kept."""
        caught: list[Tensor] = []

        def keep(_: Any, arguments: tuple[Any, ...]) -> tuple[Tensor]:
            (states,) = arguments
            caught.append(states)
            return (states[:, :1],)

        hook = self._head.register_forward_pre_hook(keep)
        try:
            yield caught
        finally:
            hook.remove()

    def _tried(self, inputs: dict[str, Tensor]) -> bool:
        """Whether the model's logits are what the head makes of its inputs, position by position."""
        whole = self._run(inputs)
        try:
            with self._one_position() as caught:
                first = self._run(inputs)
        except (RuntimeError, TypeError, ValueError):  # the model needs the logits of all positions
            return False
        (states, *further) = caught or [None]
        if further or states is None or states.shape[:2] != whole.shape[:2]:
            return False
        made = self._head(states)
        return bool(first.shape[:2] == (whole.shape[0], 1) and torch.equal(made.to(whole.dtype), whole))
