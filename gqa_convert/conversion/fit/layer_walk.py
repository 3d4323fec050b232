"""Walks through a loaded model layer by layer, with the source and students whose attention has other weights.

One ordinary pass over one sequence surveys the model: in which order its layers are called, what they return, and which
tensor attention's output is added to. Then each batch is shown to the model once, to record what every layer is called
with besides hidden states; layers that return nothing but hidden states are not computed for this. From there on, each
`Stream` runs one layer at a time on the hidden states that it keeps. A student's layers read the arguments that the
source's do, except those that come from an encoder, which each stream makes of its own encoder's output.
"""

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor

from gqa_convert.conversion.fit.attention_calls import (
    AttentionCall,
    Batch,
    CapturedAttention,
    padding_masks,
    replaced,
    watched_call,
    wrapped_forward,
)
from gqa_convert.conversion.fit.module_names import find_modules, layer_of, stacks_of
from gqa_convert.conversion.fit.residual_stream import LayerTrace, Route, first_tensor
from gqa_convert.errors import UnsupportedFamilyError

Parameters = Mapping[str, Mapping[str, Tensor]]
"""A student's parameters by the attention module's name in the checkpoint, and by their names inside it."""

_HIDDEN = object()


@dataclass(frozen=True, slots=True)
class WalkedLayer:
    """A layer of the model."""

    name: str
    """In the loaded model."""
    stack: str
    """The list of layers that it is an element of."""
    attention: tuple[str, ...]
    """Those of the named attention modules that lie in it, in the order of their calls."""
    output: Any
    """What it returned when the model was surveyed, with `_HIDDEN` in the place of hidden states."""

    def returning(self, hidden: Tensor) -> Any:
        """What the layer returns if its hidden states are these."""
        if self.output is _HIDDEN:
            return hidden
        return tuple(hidden if each is _HIDDEN else each for each in self.output)

    @property
    def returns_hidden_alone(self) -> bool:
        return self.output is _HIDDEN or len(self.output) == 1


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What a layer is called with besides hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool
    """Whether hidden states are passed by name."""

    def call(self, layer: Any, hidden: Tensor) -> Any:
        if self.by_name:
            return layer(*self.args, **self.kwargs, hidden_states=hidden)
        return layer(hidden, *self.args, **self.kwargs)


class _Reached(Exception):  # noqa: N818  # no error: it ends a pass where the rest is of no use
    """The pass has come to where it was to end."""


class LayerWalk:
    """What all streams have in common: the model, its layers, and the batches.

    Args:
        model: a loaded model in evaluation mode; it is unchanged between calls.
        batches: the inputs of the model, one mapping per batch.
        names: the attention modules' names in the checkpoint.
        precision: the context of all forward passes.
        scratch: an existing folder in which streams keep their tensors in mapped files; None to keep them in memory.
        on_batch: called with the number of batches that have passed a layer, and the number of all.

    Raises:
        ConfigError: the model has no such module.
        UnsupportedFamilyError: the model does not call each attention module once, each in a layer of its own list.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Batch],
        names: Sequence[str],
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scratch: Path | None = None,
        on_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.model, self.precision, self.on_batch = model, precision, on_batch
        self._scratch = scratch
        device = running_device(model)
        self.batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        self.modules = find_modules(model, names)
        self.routes: dict[str, Route | None] = {}
        self.layers = self._survey()
        self.stacks = list(dict.fromkeys(layer.stack for layer in self.layers))

    def attention(self, name: str, calls: Sequence[AttentionCall] = ()) -> CapturedAttention:
        """An attention module, by its name in the checkpoint, with some calls of it."""
        route = self.routes[name]
        module = self.model.get_submodule(self.modules[name])
        return CapturedAttention(name, module, calls, route.output if route else None)

    @contextmanager
    def running(self) -> Iterator[ExitStack]:
        """The context of a pass without gradients; ends where `_Reached` is raised."""
        with suppress(_Reached), torch.no_grad(), self.precision(), ExitStack() as stack:
            yield stack

    def _survey(self) -> list[WalkedLayer]:
        """The layers of all stacks in the order of their calls, from an ordinary pass over the first sequence."""
        stacks = stacks_of(self.model, self.modules.values())
        homes = {name: layer_of(self.model, loaded) for name, loaded in self.modules.items()}
        called: list[str] = []
        layers: list[WalkedLayer] = []

        def passed(layer: str, stack: str, trace: LayerTrace, _: Any, __: Any, output: Any) -> None:
            own = [name for name in called if homes[name] == layer]
            for name in own:
                self.routes[name] = trace.route(self.modules[name])
            trace.close()
            hidden = first_tensor(output)
            rest = _HIDDEN if output is hidden else tuple(_HIDDEN if each is hidden else each for each in output)
            layers.append(WalkedLayer(layer, stack, tuple(own), rest))

        def reached(name: str, _: Any, __: Any) -> None:
            called.append(name)

        with self.running() as hooks:
            for name, loaded in self.modules.items():
                module = self.model.get_submodule(loaded)
                hooks.callback(module.register_forward_pre_hook(partial(reached, name)).remove)
            for stack, names in stacks.items():
                for layer in names:
                    trace = LayerTrace(self.model, layer)
                    hooks.callback(trace.close)
                    module = self.model.get_submodule(layer)
                    hooks.callback(module.register_forward_hook(partial(passed, layer, stack, trace)).remove)
            self.model(**_first_sequence(self.batches[0]), use_cache=False)
        for name in self.modules:
            if called.count(name) != 1:
                raise UnsupportedFamilyError(
                    f"running the model on text calls {name} {called.count(name)} times, not once: it can't be calibrated; choose --method factor without calibration text"
                )
        return layers

    def streams(self, count: int) -> "list[Stream]":
        """New streams at the first layer."""
        streams = [Stream(self) for _ in range(count)]
        for number in range(len(self.batches)):
            hidden, arguments = self.record(number, self.stacks[0], {})
            for stream in streams:
                stream.start(number, hidden, arguments)
        return streams

    def record(self, number: int, stack: str, finished: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, _Arguments]]:
        """What the first layer of a stack reads on a batch, and what every layer of it is called with besides.

        Args:
            number: of the batch.
            stack: the list of layers.
            finished: the hidden states that leave the stacks before it.
        """
        entering: list[Tensor] = []
        recorded: dict[str, _Arguments] = {}
        own_layers = [layer for layer in self.layers if layer.stack == stack]

        def recording(layer: WalkedLayer, forward: Any, *args: Any, **kwargs: Any) -> Any:
            by_name = "hidden_states" in kwargs
            hidden = kwargs["hidden_states"] if by_name else args[0]
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            recorded[layer.name] = _Arguments(args if by_name else args[1:], others, by_name)
            entering.append(hidden)
            if layer is own_layers[-1]:
                raise _Reached
            return layer.returning(hidden) if layer.returns_hidden_alone else forward(*args, **kwargs)

        with self.running() as context:
            self._finish(context, finished)
            for layer in own_layers:
                module = self.model.get_submodule(layer.name)
                context.enter_context(wrapped_forward(module, partial(recording, layer, module.forward)))
            self.model(**self.batches[number], use_cache=False)
        return entering[0], recorded

    def logits(self, number: int, finished: Mapping[str, Tensor]) -> Tensor:
        """The logits [B, L, vocabulary] of a batch, from the hidden states that leave each stack."""
        with torch.no_grad(), self.precision(), ExitStack() as context:
            self._finish(context, finished)
            logits: Tensor = self.model(**self.batches[number], use_cache=False).logits
        return logits

    def _finish(self, context: ExitStack, finished: Mapping[str, Tensor]) -> None:
        """Let the layers of finished stacks return what leaves their stack."""
        for layer in self.layers:
            if layer.stack in finished:
                output = layer.returning(finished[layer.stack])
                module = self.model.get_submodule(layer.name)
                context.enter_context(wrapped_forward(module, lambda *_, _output=output, **__: _output))

    def kept(self, tensor: Tensor) -> Tensor:
        """A tensor to keep: as it is, or a copy in a mapped file without a name, which lives as long as the tensor.

        Raises:
            OSError: the disk is full. The space is reserved immediately, because running out of it through a mapping
                would kill the process.
        """
        if self._scratch is None or tensor.device.type != "cpu":
            return tensor
        with NamedTemporaryFile(dir=self._scratch, prefix="waiting-") as file:
            os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
            mapped = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
        return mapped.view(tensor.dtype).reshape(tensor.shape).copy_(tensor)


class Stream:
    """The source, or a student, on its way through the layers: its hidden states on every batch.

    Layers are to be run in the order of `LayerWalk.layers`.

    Args:
        walk: what it walks through.
    """

    def __init__(self, walk: LayerWalk) -> None:
        self._walk = walk
        self._stack = walk.stacks[0]
        self._finished: dict[str, list[Tensor]] = {}
        self._hidden: list[Tensor] = []
        self._arguments: list[dict[str, _Arguments]] = []

    def start(self, number: int, hidden: Tensor, arguments: Mapping[str, _Arguments]) -> None:
        """Stand before a stack, in the order of the batches: see `LayerWalk.record`."""
        self._hidden[number:] = [self._walk.kept(hidden)]
        self._arguments[number:] = [_with_own_states(arguments)]

    def _enter(self, layer: WalkedLayer) -> None:
        """Go on to the stack of a layer."""
        if layer.stack == self._stack:
            return
        self._finished[self._stack] = list(self._hidden)
        self._stack = layer.stack
        for number in range(len(self._hidden)):
            self.start(number, *self._walk.record(number, layer.stack, self._leaving(number)))

    def _leaving(self, number: int) -> dict[str, Tensor]:
        return {stack: hidden[number] for stack, hidden in self._finished.items()}

    def advance(self, layer: WalkedLayer, parameters: Parameters | None = None, watch: Sequence[str] = ()) -> Any:
        """Run a layer on every batch.

        Args:
            layer: the next one.
            parameters: of its attention modules, which replace the source's.
            watch: names of attention modules in it, as the checkpoint has them.

        Returns:
            By the names of `watch`, for each batch the attention's contribution plus the tensor that it is added to,
            if there is one.
        """
        self._enter(layer)
        walk = self._walk
        streams: dict[str, list[Tensor]] = {name: [] for name in watch}
        for number, hidden in enumerate(self._hidden):
            walk.on_batch(number, len(self._hidden))
            with walk.running() as context:
                calls = {name: context.enter_context(self._watched(name)) for name in watch}
                output = self._run(context, layer, number, hidden, parameters or {})
            self._hidden[number] = walk.kept(first_tensor(output))
            for name, call in calls.items():
                stream = call.output if call.residual is None else call.output + call.residual
                streams[name].append(walk.kept(stream))
        return streams

    def attention(self, layer: WalkedLayer, name: str, parameters: Parameters | None = None) -> CapturedAttention:
        """Run a layer on every batch up to the end of an attention module, with the source's weights in it.

        Args:
            layer: the next one.
            name: of the attention module in the checkpoint.
            parameters: of the attention modules before it in the layer, which replace the source's.
        """
        self._enter(layer)
        walk = self._walk
        calls = []
        for number, hidden in enumerate(self._hidden):
            with walk.running() as context:
                call = context.enter_context(self._watched(name, _Reached()))
                self._run(context, layer, number, hidden, parameters or {})
            calls.append(self._kept(call, number, walk.modules[name]))
        return walk.attention(name, calls)

    def _run(self, context: ExitStack, layer: WalkedLayer, number: int, hidden: Tensor, parameters: Parameters) -> Any:
        model = self._walk.model
        for name, own in parameters.items():
            context.enter_context(replaced(model.get_submodule(self._walk.modules[name]), own))
        return self._arguments[number][layer.name].call(model.get_submodule(layer.name), hidden)

    def _watched(self, name: str, then: Exception | None = None) -> AbstractContextManager[AttentionCall]:
        walk = self._walk
        route = walk.routes[name]
        routed = walk.model.get_submodule(route.module) if route else None
        return watched_call(walk.model.get_submodule(walk.modules[name]), route, routed, then=then)

    def _kept(self, call: AttentionCall, number: int, module: str) -> AttentionCall:
        """A call whose tensors are kept as the stream's are."""
        walk = self._walk
        batch, is_pair = walk.batches[number], walk.model.config.is_encoder_decoder
        call.counted, call.states_counted = padding_masks(batch, call, module, encoder_decoder=is_pair)
        assert call.output is not None
        call.output = walk.kept(call.output)
        if call.residual is not None and call.residual is not self._hidden[number]:
            call.residual = walk.kept(call.residual)
        return call.with_hidden(walk.kept(call.hidden))

    def logits(self, number: int) -> Tensor:
        """The logits [B, L, vocabulary] of a batch, once all layers are passed."""
        return self._walk.logits(number, self._leaving(number) | {self._stack: self._hidden[number]})


def _with_own_states(arguments: Mapping[str, _Arguments]) -> dict[str, _Arguments]:
    """Arguments of a stream's own: where layers pass keys and values to later layers in a mapping, one that no other
    stream writes to.
    """
    copies: dict[int, Any] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, MutableMapping):
            return value
        return copies.setdefault(id(value), copy(value))

    return {
        layer: _Arguments(
            tuple(own(value) for value in given.args),
            {name: own(value) for name, value in given.kwargs.items()},
            given.by_name,
        )
        for layer, given in arguments.items()
    }


def _first_sequence(batch: Batch) -> Batch:
    """The first sequence of a batch, or all of it where not every tensor counts sequences."""
    sizes = {len(tensor) for tensor in batch.values()}
    return {name: tensor[:1] for name, tensor in batch.items()} if len(sizes) == 1 else batch


@contextmanager
def weights_in_memory(module: Any) -> Iterator[None]:
    """A context in which weights of a module that accelerate has offloaded are on its device, read once."""
    with ExitStack() as stack:
        for inner in module.modules():
            hook = getattr(inner, "_hf_hook", None)
            if hook is not None:
                hook.pre_forward(inner)
                stack.callback(hook.post_forward, inner, None)
                stack.enter_context(wrapped_forward(inner, inner._old_forward))
        yield


def running_device(model: Any) -> torch.device:
    """The device on which a model computes, wherever accelerate has put its weights."""
    hook = getattr(model, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return torch.device(model.device if device is None else device)
