"""Walks through a loaded model layer by layer, with the source and students whose attention has other weights.

One ordinary pass over a little text surveys the model: in which order its layers are called, what they return, and where
attention's output enters the residual stream. Then each batch is shown to the model once, to record what every layer is
called with besides hidden states; layers that return nothing but hidden states are not computed for this. From there on,
each `Stream` runs one layer at a time on the hidden states that it keeps. A student's layers read the arguments that the
source's do, except those that come from an encoder, which each stream makes of its own encoder's output.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gqa_convert.checkpoint.mapped_tensors import mapped
from gqa_convert.conversion.fit.attention_calls import AttentionCall, Batch, CapturedAttention
from gqa_convert.conversion.fit.model_loading import find_modules, running_device, wrapped_forward
from gqa_convert.conversion.fit.residual_stream import StreamPlace, find_stream, first_tensor, on_passing
from gqa_convert.errors import UnsupportedFamilyError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a layer or an attention module is called with behind hidden states, by position and by name."""
Installing = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which an attention module has a student's weights."""
Weights = Mapping[str, Installing]
"""A student's, by the names of attention modules in the checkpoint."""
SOURCE: Weights = {}
_SURVEYED = 64
"""Tokens that tell how a model is built."""


@dataclass(frozen=True, slots=True)
class WalkedLayer:
    """A layer of the model."""

    name: str
    """In the loaded model."""
    module: Any
    stack: str
    """The list of layers that it is an element of."""
    attention: tuple[str, ...]
    """Those of the named attention modules that lie in it, in the order of their calls."""
    others: tuple[Any, ...] | None
    """What it returned behind hidden states when the model was surveyed; None where it returns a tensor."""

    def returning(self, hidden: Tensor) -> Any:
        """What the layer returns if its hidden states are these."""
        return hidden if self.others is None else (hidden, *self.others)


class _Reached(Exception):  # noqa: N818  # no error: it ends a pass where the rest is of no use
    """The pass has come to where it was to end."""


class LayerWalk:
    """What all streams have in common: the model, its layers, and the batches.

    Args:
        model: a loaded model in evaluation mode; it is unchanged between calls.
        batches: the inputs of the model, one mapping per batch.
        names: the attention modules' names in the checkpoint.
        projection: the name of the output projection inside each of them.
        precision: the context of all forward passes.
        scratch: an existing folder in which streams keep their tensors in mapped files; None to keep them in memory.
        on_batch: called with the number of batches that have passed a layer, and the number of all.

    Raises:
        ConfigError: the model has no such module.
        UnsupportedFamilyError: the model does not call each attention module once, each in a layer of a list.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Batch],
        names: Sequence[str],
        projection: str,
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scratch: Path | None = None,
        on_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.model, self.projection = model, projection
        self.precision, self.on_batch, self._scratch = precision, on_batch, scratch
        device = running_device(model)
        self.batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
        self.modules = find_modules(model, names)
        self.places: dict[str, StreamPlace] = {}
        self.layers: list[WalkedLayer] = []
        self._survey()
        self.stacks = list(dict.fromkeys(layer.stack for layer in self.layers))

    def module(self, name: str) -> Any:
        """An attention module, by its name in the checkpoint."""
        return self.model.get_submodule(self.modules[name])

    def _survey(self) -> None:
        """Find the layers of all stacks in the order of their calls, by an ordinary pass over the first tokens."""
        called: list[str] = []

        def surveyed(layer: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
            called.clear()
            output = forward(*args, **kwargs)
            inside = tuple(called)
            module = self.model.get_submodule(layer)
            with wrapped_forward(module, forward):
                for name in inside:
                    projection = f"{self.modules[name]}.{self.projection}"
                    self.places[name] = find_stream(self.model, layer, projection, partial(module, *args, **kwargs))
            others = None if isinstance(output, Tensor) else tuple(output)[1:]
            self.layers.append(WalkedLayer(layer, module, layer.rpartition(".")[0], inside, others))
            return output

        with torch.no_grad(), ExitStack() as context:
            for name in self.modules:
                hook = self.module(name).register_forward_pre_hook(lambda _, __, name=name: called.append(name))
                context.callback(hook.remove)
            for layer in self._layers_of_stacks():
                module = self.model.get_submodule(layer)
                context.enter_context(wrapped_forward(module, partial(surveyed, layer, module.forward)))
            self.model(**_beginning(self.batches[0]), use_cache=False)
        found = [name for layer in self.layers for name in layer.attention]
        for name in self.modules:
            if found.count(name) != 1:
                raise UnsupportedFamilyError(
                    f"running the model on text calls {name} {found.count(name)} times, not once: it can't be calibrated; choose --method factor without calibration text"
                )

    def _layers_of_stacks(self) -> list[str]:
        """The elements of each outermost module list that holds an attention module."""
        stacks: dict[str, int] = {}
        for name in self.modules.values():
            parts = name.split(".")
            ancestors = [".".join(parts[:count]) for count in range(1, len(parts))]
            modules = [self.model.get_submodule(ancestor) for ancestor in ancestors]
            lists = [pair for pair in zip(ancestors, modules, strict=True) if isinstance(pair[1], torch.nn.ModuleList)]
            if lists:
                stack, module = lists[0]
                stacks[stack] = len(module)
        return [f"{stack}.{number}" for stack, count in stacks.items() for number in range(count)]

    def streams(self, count: int) -> "list[Stream]":
        """New streams at the first layer."""
        recorded = [self.record(number, {}) for number in range(len(self.batches))]
        return [Stream(self, recorded) for _ in range(count)]

    def record(self, number: int, finished: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Arguments]]:
        """What enters the next stack on a batch: hidden states, and what each of its layers is called with behind them.

        Args:
            number: of the batch.
            finished: the hidden states that leave the stacks before it.
        """
        entering: list[Tensor] = []
        recorded: dict[str, Arguments] = {}
        layers = [layer for layer in self.layers if layer.stack == self.stacks[len(finished)]]

        def recording(layer: WalkedLayer, forward: Any, *args: Any, **kwargs: Any) -> Any:
            hidden, recorded[layer.name] = hidden_first(args, kwargs)
            entering.append(hidden)
            if layer is layers[-1]:
                raise _Reached
            return forward(*args, **kwargs) if layer.others else layer.returning(hidden)

        with suppress(_Reached), ExitStack() as context:
            for layer in layers:
                wrapped = wrapped_forward(layer.module, partial(recording, layer, layer.module.forward))
                context.enter_context(wrapped)
            self._run(number, finished)
        return entering[0], recorded

    def logits(self, number: int, finished: Mapping[str, Tensor]) -> Tensor:
        """The logits [B, L, vocabulary] of a batch, from the hidden states that leave each stack."""
        logits: Tensor = self._run(number, finished).logits
        return logits

    def _run(self, number: int, finished: Mapping[str, Tensor]) -> Any:
        """Run the model on a batch, where the layers of finished stacks return what leaves their stack."""
        with torch.no_grad(), self.precision(), ExitStack() as context:
            for layer in self.layers:
                if layer.stack in finished:
                    output = layer.returning(finished[layer.stack])
                    context.enter_context(wrapped_forward(layer.module, lambda *_, _output=output, **__: _output))
            return self.model(**self.batches[number], use_cache=False)

    def kept(self, tensor: Tensor) -> Tensor:
        """A tensor to keep: as it is, or a copy in a mapped file.

        Raises:
            OSError: the disk is full.
        """
        if self._scratch is None or tensor.device.type != "cpu":
            return tensor
        kept: Tensor = mapped(tensor, self._scratch)
        return kept


class Stream:
    """The source, or a student, on its way through the layers: its hidden states on every batch.

    Layers are to be run in the order of `LayerWalk.layers`.

    Args:
        walk: what it walks through.
        recorded: what enters the first stack on each batch, and what its layers are called with.
    """

    def __init__(self, walk: LayerWalk, recorded: Sequence[tuple[Tensor, dict[str, Arguments]]]) -> None:
        self._walk = walk
        self._hidden: list[dict[str, Tensor]] = [{} for _ in recorded]
        """Of each batch by stack: what leaves the finished ones, and where it is in the last."""
        self._start(walk.stacks[0], recorded)

    def _start(self, stack: str, recorded: Sequence[tuple[Tensor, dict[str, Arguments]]]) -> None:
        for states, (hidden, _) in zip(self._hidden, recorded, strict=True):
            states[stack] = self._walk.kept(hidden)
        self._arguments = [_with_own_mappings(arguments) for _, arguments in recorded]

    def advance(
        self, layer: WalkedLayer, weights: Weights = SOURCE, watch: Sequence[str] = ()
    ) -> dict[str, list[Tensor]]:
        """Run a layer on every batch.

        Args:
            layer: the next one.
            weights: of a student's attention modules in it.
            watch: names of attention modules in it, as the checkpoint has them.

        Returns:
            By the names of `watch`, for each batch the residual stream with attention's contribution; the contribution
            alone where it becomes no part of the stream.
        """
        walk = self._walk
        if layer.stack not in self._hidden[0]:
            self._start(layer.stack, [walk.record(*each) for each in enumerate(self._hidden)])
        streams: dict[str, list[Tensor]] = {name: [] for name in watch}
        for number, states in enumerate(self._hidden):
            walk.on_batch(number, len(self._hidden))
            with ExitStack() as context:
                passages = [_Passage(context, walk, name) for name in watch]
                states[layer.stack] = walk.kept(first_tensor(self._run(layer, number, weights)))
            for name, passage in zip(watch, passages, strict=True):
                streams[name].append(walk.kept(passage.stream))
        return streams

    def attention(
        self, layer: WalkedLayer, name: str, weights: Weights = SOURCE, streams: Sequence[Tensor] | None = None
    ) -> CapturedAttention:
        """Run a layer on every batch up to the end of an attention module, with the source's weights in it.

        Args:
            layer: the next one.
            name: of the attention module in the checkpoint.
            weights: of the attention modules before it in the layer.
            streams: what `advance` returned for the source; by default this stream is the source.
        """
        walk = self._walk
        if layer.stack not in self._hidden[0]:
            self._start(layer.stack, [walk.record(*each) for each in enumerate(self._hidden)])
        calls = []
        for number, batch in enumerate(walk.batches):
            with ExitStack() as context:
                passage = _Passage(context, walk, name, ends=True)
                context.enter_context(suppress(_Reached))
                self._run(layer, number, weights)
            hidden, (args, kwargs) = passage.arguments
            output = target = walk.kept(passage.output.reshape(*hidden.shape[:-1], -1))
            if streams is not None:
                missed = (streams[number] - passage.stream).reshape(output.shape)
                target = walk.kept(output + missed / walk.places[name].factor)
            call = AttentionCall(walk.kept(hidden), args, kwargs, output, target)
            call.find_padding(batch, walk.modules[name], encoder_decoder=walk.model.config.is_encoder_decoder)
            calls.append(call)
        return CapturedAttention(name, walk.module(name), walk.projection, calls)

    def _run(self, layer: WalkedLayer, number: int, weights: Weights) -> Any:
        args, kwargs = self._arguments[number][layer.name]
        with torch.no_grad(), self._walk.precision(), ExitStack() as context:
            for installed in weights.values():
                context.enter_context(installed())
            return layer.module(self._hidden[number][layer.stack], *args, **kwargs)

    def logits(self, number: int) -> Tensor:
        """The logits [B, L, vocabulary] of a batch, once all layers are passed."""
        return self._walk.logits(number, self._hidden[number])


class _Passage:
    """What the next call of an attention module reads, and what it yields.

    Args:
        context: in which to watch.
        walk: of the module.
        name: of the module in the checkpoint.
        ends: whether to end the pass when everything is known.
    """

    def __init__(self, context: ExitStack, walk: LayerWalk, name: str, *, ends: bool = False) -> None:
        self.arguments: Any = None
        self.output: Any = None
        """Of the output projection."""
        self.stream: Any = None
        """The residual stream with the contribution; `output` where that becomes no part of the stream."""
        self._ends = ends
        place, module = walk.places[name], walk.module(name)
        for hook in (
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            on_passing(module.get_submodule(walk.projection), False, self._project),
            on_passing(walk.model.get_submodule(place.module), place.enters, self._arrive),
        ):
            context.callback(hook.remove)

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = hidden_first(args, kwargs)

    def _project(self, output: Tensor) -> None:
        self.output = output

    def _arrive(self, stream: Tensor) -> None:
        if self.output is None:  # the module is called before attention too
            return
        self.stream = stream
        if self._ends:
            raise _Reached


def hidden_first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Arguments]:
    """Hidden states, which are the first argument of every layer and of every attention module, and the other arguments."""
    others = dict(kwargs)
    if "hidden_states" in others:
        return others.pop("hidden_states"), (args, others)
    return args[0], (args[1:], others)


def _with_own_mappings(recorded: Mapping[str, Arguments]) -> dict[str, Arguments]:
    """Arguments of a stream's own: where layers pass keys and values to later layers in a mapping, one that no other stream
    writes to.
    """
    own: dict[int, Any] = {}
    found = {}
    for layer, (args, kwargs) in recorded.items():
        named = dict(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, MutableMapping):
                named[name] = own.setdefault(id(value), copy(value))
        found[layer] = args, named
    return found


_BY_SEQUENCE = frozenset(
    {
        "input_ids",
        "attention_mask",
        "position_ids",
        "decoder_input_ids",
        "decoder_attention_mask",
        "labels",
        "encoder_outputs",
    }
)
"""Inputs with a row for each sequence; rows of others may be images or parts of them."""
_TOKENS_TOGETHER = 512
"""Of short sequences that are run together."""


def parts_of(batch: Batch) -> list[Batch]:
    """A batch in parts of one sequence, or of some short ones; one that holds more than text, whole."""
    if not batch.keys() <= _BY_SEQUENCE:
        return [batch]
    length = max(tensor.shape[1] for tensor in batch.values() if not tensor.is_floating_point())
    together = max(1, _TOKENS_TOGETHER // length)
    rows = range(0, len(next(iter(batch.values()))), together)
    return [{name: tensor[row : row + together] for name, tensor in batch.items()} for row in rows]


def _beginning(batch: Batch) -> Batch:
    """The first tokens of the first sequence; a batch that holds more than text, whole."""
    if not batch.keys() <= _BY_SEQUENCE:
        return batch
    return {name: tensor[:1, :_SURVEYED] for name, tensor in batch.items()}
