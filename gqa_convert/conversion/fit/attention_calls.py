"""The calls of an attention module on text, which can be repeated with any weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Batch = Mapping[str, Tensor]
"""The inputs of the model: tensors by argument."""

_STATES = ("key_value_states", "encoder_hidden_states")
"""Keyword arguments for the states that keys and values are projected from, in cross-attention."""


@dataclass(slots=True)
class AttentionCall:
    """One call of an attention module: B sequences of L positions, d numbers each."""

    hidden: Tensor
    """[B, L, d], the states that queries are projected from: the first argument."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    """[B, L, d], the contribution to the residual stream that the source's weights yield."""
    target: Tensor
    """[B, L, d], the contribution that would bring the residual stream to the source's."""
    counted: Tensor | None = None
    """[B, L] bool: the positions that are not padding; None if there is no padding."""
    states_counted: Tensor | None = None
    """[B, S] bool: the positions of `states` that are not padding; None if there is no padding."""

    @property
    def states(self) -> Tensor:
        """[B, S, d], the states that keys and values are projected from: `hidden`, or an encoder's output."""
        found = [self.kwargs[name] for name in _STATES if isinstance(self.kwargs.get(name), Tensor)]
        return found[0] if found else self.hidden

    def find_padding(self, batch: Batch, module: str, *, encoder_decoder: bool) -> None:
        """Set `counted` and `states_counted`.

        Args:
            batch: the inputs of the model.
            module: the module's name in the loaded model.
            encoder_decoder: whether the model is an encoder-decoder.
        """
        decodes = encoder_decoder and "encoder" not in module.split(".")
        self.counted = _counted(batch.get("decoder_attention_mask" if decodes else "attention_mask"), self.hidden)
        self.states_counted = self.counted
        if self.states is not self.hidden:
            self.states_counted = _counted(batch.get("attention_mask"), self.states)

    def between(self, share: float) -> Tensor:
        """[B, L, d], float32, from `output` at a share of 0 to `target` at 1."""
        return self.output.float().lerp(self.target.float(), share)

    def square(self, tensor: Tensor) -> Tensor:
        """The sum of the squares of a tensor [B, L, d], without padding, in float64."""
        squares = tensor.square().sum(-1).double()
        return squares.sum() if self.counted is None else squares[self.counted].sum()


@dataclass(slots=True)
class CapturedAttention:
    """An attention module with its calls on every batch, which `run` makes again."""

    name: str
    """In the checkpoint."""
    module: Any
    projection: str
    """The name of the output projection inside the module."""
    calls: Sequence[AttentionCall]

    def run(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Make a call again, with the weights that the module has now.

        Args:
            call: one of `calls`.

        Returns:
            The contribution [B, L, d], and the input of the output projection [B, L, heads * head_dim].
        """
        seen: list[Tensor] = []
        projection = self.module.get_submodule(self.projection)
        hook = projection.register_forward_hook(lambda _, args, output: seen.extend((output, args[0])))
        try:
            self.module(call.hidden, *call.args, **call.kwargs)
        finally:
            hook.remove()
        contribution, entered = seen
        sizes = call.hidden.shape[:-1]
        return contribution.reshape(*sizes, -1), entered.reshape(*sizes, -1)


def _counted(mask: Tensor | None, states: Tensor) -> Tensor | None:
    if mask is None or mask.shape != states.shape[:2] or bool(mask.all()):
        return None
    return mask.bool()
