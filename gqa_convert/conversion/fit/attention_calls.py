"""The calls of an attention module on text, which can be repeated with any weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gqa_convert.errors import UnsupportedFamilyError

Batch = Mapping[str, Tensor]
"""The inputs of the model: tensors by argument."""
Parameters = Mapping[str, Tensor]
"""Parameters of a module by their names inside it."""

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
        for name in _STATES:
            if isinstance(self.kwargs.get(name), Tensor):
                states: Tensor = self.kwargs[name]
                return states
        return self.hidden

    def find_padding(self, batch: Batch, module: str, *, encoder_decoder: bool) -> None:
        """Set `counted` and `states_counted`.

        Args:
            batch: the inputs of the model.
            module: the module's name in the loaded model.
            encoder_decoder: whether the model is an encoder-decoder.
        """
        mask = states_mask = batch.get("attention_mask")
        if encoder_decoder and "encoder" not in module.split("."):
            mask = batch.get("decoder_attention_mask")
            if self.states is self.hidden:
                states_mask = mask
        self.counted, self.states_counted = _counted(mask, self.hidden), _counted(states_mask, self.states)

    def between(self, share: float) -> Tensor:
        """[B, L, d], float32, from `output` at a share of 0 to `target` at 1."""
        return self.output.float().lerp(self.target.float(), share)

    def square(self, tensor: Tensor) -> Tensor:
        """The sum of the squares of a tensor [B, L, d], without padding."""
        squares = tensor.square().sum(-1)
        return squares.sum() if self.counted is None else squares[self.counted].sum()


@dataclass(slots=True)
class CapturedAttention:
    """An attention module with its calls on every batch, which `run` makes again with any weights."""

    name: str
    """In the checkpoint."""
    module: Any
    projection: str
    """The name of the output projection inside the module."""
    calls: Sequence[AttentionCall]

    @property
    def device(self) -> Any:
        return next(self.module.parameters()).device

    def run(self, call: AttentionCall, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """Make a call again, with gradients if they are enabled and a parameter requires them.

        Args:
            call: one of `calls`.
            parameters: parameters that replace the source's; all others are the source's.

        Returns:
            The contribution [B, L, d], and the input of the output projection [B, L, heads * head_dim].
        """
        seen: list[Tensor] = []
        projection = self.module.get_submodule(self.projection)
        hook = projection.register_forward_hook(lambda _, args, output: seen.extend((output, args[0])))
        try:
            with replaced(self.module, parameters):
                self.module(call.hidden, *call.args, **call.kwargs)
        finally:
            hook.remove()
        contribution, entered = seen
        sizes = call.hidden.shape[:-1]
        return contribution.reshape(*sizes, -1), entered.reshape(*sizes, -1)


def fitting_parameters(name: str, module: Any, parameters: Parameters) -> dict[str, Tensor]:
    """Parameters in a module's dtype and on its device.

    Args:
        name: of the module, for the error.
        module: the loaded one.
        parameters: by their names inside it.

    Raises:
        UnsupportedFamilyError: the module has no such parameter, or it has another shape.
    """
    own = dict(module.named_parameters())
    fitting = {}
    for key, tensor in parameters.items():
        if key not in own or own[key].shape != tensor.shape:
            raise UnsupportedFamilyError(
                f"transformers holds {name} otherwise than the checkpoint does ({key}), so that calibration can't fit it: "
                "choose --method factor without calibration text"
            )
        fitting[key] = tensor.to(own[key].device, own[key].dtype)
    return fitting


def _counted(mask: Tensor | None, states: Tensor) -> Tensor | None:
    if mask is None or mask.shape != states.shape[:2] or bool(mask.all()):
        return None
    return mask.bool()


@contextmanager
def replaced(module: Any, parameters: Parameters) -> Iterator[None]:
    """A context in which a module's parameters are replaced; gradients reach replacements that require them.

    Args:
        module: a torch module.
        parameters: the replacements by name inside the module; all others are kept.
    """
    homes = []
    try:
        for name, tensor in parameters.items():
            path, _, last = name.rpartition(".")
            home = module.get_submodule(path)._parameters
            homes.append((home, last, home[last]))
            home[last] = tensor
        yield
    finally:
        for home, last, own in homes:
            home[last] = own


@contextmanager
def wrapped_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """A context in which a module's `forward` is replaced."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
