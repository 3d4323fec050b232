"""An attention module that every batch of the source and the student has reached, with the paused calls."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gqa_convert.conversion.fit.lockstep.substitution import replaced

_STATES = ("key_value_states", "encoder_hidden_states")
"""Keyword arguments for the states that keys and values are projected from, in cross-attention."""


@dataclass(slots=True, kw_only=True)
class Call:
    """The arguments of one call of an attention module: B sequences of L positions, d numbers each."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    counted: Tensor | None
    """[B, L] bool: the positions that are not padding; None if there is no padding."""
    states_counted: Tensor | None
    """[B, S] bool: the positions of `states` that are not padding; None if there is no padding."""
    added_to: Tensor | None = None
    """[B, L, d], the tensor that the attention's output will be added to, in units of that output; see
    `CapturedModule.residual`.
    """

    @property
    def hidden(self) -> Tensor:
        """[B, L, d], the states that queries are projected from."""
        hidden = self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.args[0]
        assert isinstance(hidden, Tensor)
        return hidden

    @property
    def states(self) -> Tensor:
        """[B, S, d], the states that keys and values are projected from: `hidden`, or an encoder's output."""
        return next((self.kwargs[name] for name in _STATES if isinstance(self.kwargs.get(name), Tensor)), self.hidden)


class CapturedModule:
    """A captured attention module, which `run` calls again with any weights.

    Args:
        name: the module's name in the checkpoint.
        module: the loaded module.
        source: the source's parameters by name inside the module.
        calls: one pair per batch: the source's call and the student's.
        output: the name of the output projection inside the module, if its output alone is the attention's
            contribution.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        source: dict[str, Tensor],
        calls: list[tuple[Call, Call]],
        output: str | None = None,
    ) -> None:
        self.name, self.module, self.calls = name, module, calls
        self.committed: dict[str, Tensor] = {}
        self._source, self._output = source, output

    def first(self, batches: int) -> "CapturedModule":
        """The same module with the calls of the first batches alone."""
        calls = self.calls if len(self.calls) <= batches else self.calls[:batches]
        return CapturedModule(self.name, self.module, self._source, calls, self._output)

    def parameters(self) -> dict[str, Tensor]:
        """The source's parameters by name inside the module; the tensors are not copied."""
        return dict(self._source)

    def run(
        self, call: Call, parameters: Mapping[str, Tensor] | None = None, capture: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Call the module again, with gradients if they are enabled and a parameter requires them.

        Args:
            call: one of `calls`.
            parameters: parameters that replace the source's; all others are the source's.
            capture: the name of the output projection inside the module, to return its input too.

        Returns:
            The attention's contribution [B, L, d], and the input of the output projection [B, L, heads * head_dim],
            which is None without `capture`.
        """
        caught: dict[str, Tensor] = {}
        with ExitStack() as stack:
            stack.enter_context(replaced(self.module, self._source | self._fitting(parameters or {})))
            if capture is not None:
                hook = lambda _, inputs: caught.__setitem__("input", inputs[0])  # noqa: E731
                stack.callback(self.module.get_submodule(capture).register_forward_pre_hook(hook).remove)
            if self._output is not None:
                hook_output = lambda _, __, output: caught.__setitem__("output", output)  # noqa: E731
                stack.callback(self.module.get_submodule(self._output).register_forward_hook(hook_output).remove)
            output = first_tensor(self.module(*call.args, **call.kwargs))
        output = caught.get("output", output)
        entered = caught.get("input")
        shape = (*call.hidden.shape[:-1], -1)
        return output.reshape(shape), None if entered is None else entered.reshape(shape)

    def residual(self, call: Call) -> Tensor | None:
        """The tensor r [B, L, d] for which r + (the attention's contribution) is, up to one constant factor, the
        residual stream that later layers read.

        None if there is no such tensor, for example if the output is normed before it is added.
        """
        return call.added_to

    def commit(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the student's weights, converted to the module's dtype and device; all others stay the source's.

        Raises:
            ValueError: the module has no such parameter, or it has another shape.
        """
        self.committed = self._fitting(parameters)

    def _fitting(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        fitting = {}
        for name, tensor in parameters.items():
            own = self._source.get(name)
            if own is None or own.shape != tensor.shape:
                found = "no such parameter" if own is None else f"shape {tuple(own.shape)}"
                raise ValueError(
                    f"{self.name}.{name} was given with shape {tuple(tensor.shape)}, and the module has {found}"
                )
            alike = tensor.dtype == own.dtype and tensor.device == own.device
            fitting[name] = tensor if alike else tensor.to(own)
        return fitting


def first_tensor(output: Any) -> Tensor:
    """The first tensor of a module's output."""
    first = output if isinstance(output, Tensor) else next(each for each in output if isinstance(each, Tensor))
    assert isinstance(first, Tensor)
    return first
