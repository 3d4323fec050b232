"""The calls of an attention module on text, which can be repeated with any weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from gqa_convert.conversion.fit.residual_stream import Route, first_tensor
from gqa_convert.errors import UnsupportedFamilyError

Batch = Mapping[str, Tensor]
"""The inputs of the model: tensors by argument."""


class Targets(Protocol):
    """Tensors by the number of the batch: a list of them, or what makes them."""

    def __getitem__(self, number: int, /) -> Tensor: ...


_STATES = ("key_value_states", "encoder_hidden_states")
"""Keyword arguments for the states that keys and values are projected from, in cross-attention."""


@dataclass(slots=True, kw_only=True)
class AttentionCall:
    """One call of an attention module: B sequences of L positions, d numbers each."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any]
    output: Tensor | None = None
    """[B, L, d], the attention's contribution to the residual stream."""
    residual: Tensor | None = None
    """[B, L, d], the tensor that the output is added to, in units of the output; None if there is no such tensor."""
    counted: Tensor | None = None
    """[B, L] bool: the positions that are not padding; None if there is no padding."""
    states_counted: Tensor | None = None
    """[B, S] bool: the positions of `states` that are not padding; None if there is no padding."""

    @property
    def hidden(self) -> Tensor:
        """[B, L, d], the states that queries are projected from."""
        hidden: Tensor = self.kwargs["hidden_states"] if "hidden_states" in self.kwargs else self.args[0]
        return hidden

    @property
    def states(self) -> Tensor:
        """[B, S, d], the states that keys and values are projected from: `hidden`, or an encoder's output."""
        for name in _STATES:
            if isinstance(self.kwargs.get(name), Tensor):
                states: Tensor = self.kwargs[name]
                return states
        return self.hidden

    def with_hidden(self, hidden: Tensor) -> "AttentionCall":
        """The same call on a copy of its `hidden` states."""
        if "hidden_states" in self.kwargs:
            return replace(self, kwargs=self.kwargs | {"hidden_states": hidden})
        return replace(self, args=(hidden, *self.args[1:]))

    def square(self, tensor: Tensor) -> float:
        """The sum of the squares of a tensor [B, L, d], without padding."""
        squares = tensor.detach().double().square().sum(-1)
        return float((squares if self.counted is None else squares[self.counted]).sum())


@dataclass(slots=True)
class CapturedAttention:
    """An attention module with its calls on every batch, which `run` makes again with any weights."""

    name: str
    """In the checkpoint."""
    module: Any
    calls: Sequence[AttentionCall]
    output: str | None = None
    """The module inside whose output alone is the attention's contribution; None for the attention module itself."""

    def parameters(self) -> dict[str, Tensor]:
        """The source's parameters by name inside the module; the tensors are not copied."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def fitting(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters in the module's dtype and on its device.

        Raises:
            UnsupportedFamilyError: the module has no such parameter, or it has another shape.
        """
        own = self.parameters()
        fitting = {}
        for name, tensor in parameters.items():
            if name not in own or own[name].shape != tensor.shape:
                raise UnsupportedFamilyError(
                    f"transformers holds {self.name} otherwise than the checkpoint does ({name}), so that calibration can't fit it: "
                    "choose --method factor without calibration text"
                )
            alike = tensor.dtype == own[name].dtype and tensor.device == own[name].device
            fitting[name] = tensor if alike else tensor.to(own[name])
        return fitting

    def run(
        self, call: AttentionCall, parameters: Mapping[str, Tensor] | None = None, capture: str | None = None
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
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        with ExitStack() as stack:
            stack.enter_context(replaced(self.module, parameters or {}))
            if capture is not None:
                projection = self.module.get_submodule(capture)
                stack.callback(projection.register_forward_pre_hook(lambda _, args: inputs.append(args[0])).remove)
            if self.output is not None:
                inner = self.module.get_submodule(self.output)
                stack.callback(inner.register_forward_hook(lambda _, __, output: outputs.append(output)).remove)
            outputs.append(first_tensor(self.module(*call.args, **call.kwargs)))
        shape = (*call.hidden.shape[:-1], -1)
        entered = inputs[0].reshape(shape) if inputs else None
        return outputs[0].reshape(shape), entered


@contextmanager
def watched_call(module: Any, route: Route | None, routed: Any, *, then: Any = None) -> Iterator[AttentionCall]:
    """A context in which the next call of an attention module is noted.

    Args:
        module: the attention module.
        route: where the tensor enters that attention's output is added to; None if there is none.
        routed: the route's module.
        then: an exception to raise once the call is over.

    Yields:
        What becomes the call.
    """
    call = AttentionCall(kwargs={})

    def entering(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.args, call.kwargs = args, dict(kwargs)

    def routing(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert route is not None
        call.residual = route.residual(args, kwargs)

    def contributing(_: Any, __: Any, output: Any) -> None:
        call.output = first_tensor(output)

    def leaving(_: Any, __: Any, output: Any) -> None:
        if call.output is None:
            call.output = first_tensor(output)
        call.output = call.output.reshape(*call.hidden.shape[:-1], -1)
        if then is not None:
            raise then

    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(entering, with_kwargs=True).remove)
        if route is not None:
            stack.callback(routed.register_forward_pre_hook(routing, with_kwargs=True).remove)
            if route.output is not None:
                inner = module.get_submodule(route.output)
                stack.callback(inner.register_forward_hook(contributing).remove)
        stack.callback(module.register_forward_hook(leaving).remove)
        yield call


def padding_masks(
    batch: Batch, call: AttentionCall, module: str, *, encoder_decoder: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The positions of a call's queries and of its keys that are not padding, [B, L] and [B, S]; None for all.

    Args:
        batch: the inputs of the model.
        call: of the attention module.
        module: the module's name in the loaded model.
        encoder_decoder: whether the model is an encoder-decoder.
    """
    mask = batch.get("attention_mask")
    if not encoder_decoder or "encoder" in module.split("."):
        return _counted(mask, call.hidden), _counted(mask, call.states)
    inner = batch.get("decoder_attention_mask")
    crosses = call.states is not call.hidden
    return _counted(inner, call.hidden), _counted(mask if crosses else inner, call.states)


def _counted(mask: Tensor | None, states: Tensor) -> Tensor | None:
    if mask is None or mask.shape != states.shape[:2] or bool(mask.all()):
        return None
    return mask.bool()


@contextmanager
def replaced(module: Any, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which a module's parameters are replaced; gradients reach replacements that require them.

    Args:
        module: a torch module.
        parameters: the replacements by name inside the module; all others are kept.
    """
    homes = []
    for name, tensor in parameters.items():
        path, _, last = name.rpartition(".")
        home = module.get_submodule(path)._parameters
        homes.append((home, last, home[last]))
        home[last] = tensor
    try:
        yield
    finally:
        for home, last, own in homes:
            home[last] = own


@contextmanager
def wrapped_forward(module: Any, forward: Any) -> Iterator[None]:
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
