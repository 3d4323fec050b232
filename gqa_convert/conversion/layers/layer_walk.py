"""Walks through a loaded model layer by layer, with the source and students whose attention has other weights.

One ordinary pass over a little text surveys the model: in which order its layers are called, what they return, and where
attention's output enters the residual stream. Then each batch is shown to the model once, to record what every layer is
called with besides hidden states; layers that return nothing but hidden states are not computed for this. From there on,
each `Stream` runs one layer at a time on the hidden states that it keeps. A student's layers read the arguments that the
source's do, except those that come from an encoder, which each stream makes of its own encoder's output.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gqa_convert.conversion.calibration.streams import Batch, tokens_of
from gqa_convert.conversion.layers.attention_calls import (
    MASSIVE,
    AttentionCall,
    CapturedAttention,
    own_rows,
)
from gqa_convert.conversion.layers.model_loading import (
    find_modules,
    running_device,
    wrapped_forward,
)
from gqa_convert.conversion.layers.residual_stream import (
    StreamPlace,
    find_stream,
    first_tensor,
    on_passing,
)
from gqa_convert.errors import NonFiniteError, UnsupportedFamilyError
from gqa_convert.processes import gathered

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a layer or an attention module is called with behind hidden states, by position and by name."""
Recorded = tuple[Tensor, dict[str, Arguments]]
"""The hidden states that enter a stack of layers, and what each of its layers is called with behind them, by name."""
Installing = Callable[[], AbstractContextManager[Any]]
"""Returns a context in which an attention module has a student's weights."""
Replacements = Mapping[str, Installing]
"""What is installed in a student, by the names of attention modules in the checkpoint."""
SOURCE: Replacements = {}
"""Nothing is."""
_SURVEYED = 64
"""Tokens that tell how a model is built."""


class WalkedLayer(NamedTuple):
    """A layer of the model.

    Attributes:
        name: in the loaded model.
        stack: the list of layers that it is an element of.
        attention: those of the named attention modules that lie in it, in the order of their calls.
        others: what it returned behind hidden states when the model was surveyed; None where it returns a tensor.
    """

    name: str
    module: Any
    stack: str
    attention: tuple[str, ...]
    others: tuple[Any, ...] | None

    def returning(self, hidden: Tensor) -> Any:
        """What the layer returns if its hidden states are these."""
        return hidden if self.others is None else (hidden, *self.others)


class _Reached(Exception):  # noqa: N818  # no error: it ends a pass where the rest is of no use
    """The pass has come to where it was to end."""


class LayerWalk:
    """What all streams have in common: the model, its layers, and the batches.

    Args:
        model: a loaded model in evaluation mode; it is unchanged between calls.
        batches: the inputs of the model, one mapping per batch; several processes divide their rows.
        names: the attention modules' names in the checkpoint.
        projection: the name of the output projection inside each of them.
        precision: the context of all forward passes.

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
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.projection, self._precision = model, projection, precision
        device = running_device(model)
        self.all_rows = [len(tokens_of(batch)) for batch in batches]
        own = own_rows(batches)
        self.numbers = [*own]
        self.batches = [
            {name: tensor.to(device) for name, tensor in batch.items()} for batch in own.values()
        ]
        self.modules = find_modules(model, names)
        self.places: dict[str, StreamPlace] = {}
        self.layers: list[WalkedLayer] = []
        self._survey(
            {name: tensor[:1, :_SURVEYED].to(device) for name, tensor in batches[0].items()}
        )
        self.stacks = list(dict.fromkeys(layer.stack for layer in self.layers))

    def module(self, name: str) -> Any:
        """An attention module, by its name in the checkpoint."""
        return self.model.get_submodule(self.modules[name])

    def _survey(self, few: Batch) -> None:
        """Find the layers of all stacks in the order of their calls, by an ordinary pass over a few tokens."""
        called: list[str] = []

        def surveyed(
            stack: str, name: str, module: Any, forward: Any, *args: Any, **kwargs: Any
        ) -> Any:
            called.clear()
            output = forward(*args, **kwargs)
            inside = tuple(called)
            with wrapped_forward(module, forward):
                for attention in inside:
                    projection = f"{self.modules[attention]}.{self.projection}"
                    self.places[attention] = find_stream(
                        self.model, name, projection, partial(module, *args, **kwargs)
                    )
            others = None if isinstance(output, Tensor) else tuple(output)[1:]
            self.layers.append(WalkedLayer(name, module, stack, inside, others))
            return output

        with torch.no_grad(), ExitStack() as context:
            for name in self.modules:
                noting = self.module(name).register_forward_pre_hook(
                    lambda _, __, name=name: called.append(name)
                )
                context.enter_context(noting)
            for name, stack in list_elements(self.model, self.modules.values()).items():
                module = self.model.get_submodule(name)
                forward = partial(surveyed, stack, name, module, module.forward)
                context.enter_context(wrapped_forward(module, forward))
            self.model(**few, use_cache=False)
        found = [name for layer in self.layers for name in layer.attention]
        for name in self.modules:
            if found.count(name) != 1:
                raise UnsupportedFamilyError(
                    f"running the model on text calls {name} {found.count(name)} times in its lists of layers, not once: it can't "
                    "be calibrated; choose --method factor without calibration text"
                )

    def streams(self, count: int) -> "list[Stream]":
        """New streams at the first layer."""
        recorded = [self.record(number, {}) for number in range(len(self.batches))]
        return [Stream(self, recorded) for _ in range(count)]

    def record(self, number: int, finished: Mapping[str, Tensor]) -> Recorded:
        """What enters the next stack on a batch.

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
                wrapped = wrapped_forward(
                    layer.module, partial(recording, layer, layer.module.forward)
                )
                context.enter_context(wrapped)
            self.run(number, finished)
        return entering[0], recorded

    def run(self, number: int, finished: Mapping[str, Tensor]) -> Any:
        """Run the model on a batch, where the layers of finished stacks return what leaves their stack.

        Args:
            number: of the batch.
            finished: the hidden states that leave each of these stacks.
        """
        with self.running() as context:
            for layer in self.layers:
                if layer.stack in finished:
                    output = layer.returning(finished[layer.stack])
                    context.enter_context(
                        wrapped_forward(layer.module, lambda *_, _output=output, **__: _output)
                    )
            return self.model(**self.batches[number], use_cache=False)

    @contextmanager
    def running(self) -> Iterator[ExitStack]:
        """The context of forward passes."""
        with torch.no_grad(), self._precision(), ExitStack() as context:
            yield context

    @contextmanager
    def watching(self, name: str, *, ends: bool = False) -> Iterator[dict[str, Any]]:
        """A context that notes of the next call of an attention module: its `hidden` states and other `arguments`, the `output`
        of its projection, and the residual `stream` with this, or the output where that becomes no part of the stream.

        Args:
            name: of the module in the checkpoint.
            ends: end the pass when everything is known.
        """
        seen: dict[str, Any] = {}

        def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen["hidden"], seen["arguments"] = hidden_first(args, kwargs)

        def project(output: Tensor) -> None:
            seen["output"] = output

        def arrive(stream: Tensor) -> None:
            if "output" in seen:  # the module may be called before attention too
                seen["stream"] = stream
                if ends:
                    raise _Reached

        place, module = self.places[name], self.module(name)
        with (
            suppress(_Reached),
            module.register_forward_pre_hook(enter, with_kwargs=True),
            on_passing(module.get_submodule(self.projection), False, project),
            on_passing(self.model.get_submodule(place.module), place.enters, arrive),
        ):
            yield seen


class Stream:
    """The source, or a student, on its way through the layers: its hidden states on every batch.

    Layers are to be run in the order of `LayerWalk.layers`.

    Args:
        walk: what it walks through.
        recorded: what enters the first stack on each batch.
    """

    def __init__(self, walk: LayerWalk, recorded: Sequence[Recorded]) -> None:
        self._walk = walk
        self._hidden = [{walk.stacks[0]: hidden} for hidden, _ in recorded]
        """Of each batch by stack: what leaves the finished ones, and where it is in the last."""
        self._arguments = [_with_own_mappings(arguments) for _, arguments in recorded]

    def advance(
        self, layer: WalkedLayer, weights: Replacements = SOURCE, watch: Sequence[str] = ()
    ) -> dict[str, list[Tensor]]:
        """Run a layer on every batch.

        Args:
            layer: the next one.
            weights: those of a student's attention modules in it.
            watch: names of attention modules in it, as the checkpoint has them.

        Returns:
            By the names of `watch`, for each batch the residual stream with attention's contribution; the contribution
            alone where it becomes no part of the stream.
        """
        streams: dict[str, list[Tensor]] = {name: [] for name in watch}
        self._enter(layer)
        for number, states in enumerate(self._hidden):
            with ExitStack() as context:
                seen = {name: context.enter_context(self._walk.watching(name)) for name in watch}
                states[layer.stack] = first_tensor(self._run(layer, number, weights))
            for name in watch:
                streams[name].append(seen[name]["stream"])
        return streams

    def attention(
        self,
        layer: WalkedLayer,
        name: str,
        weights: Replacements = SOURCE,
        streams: Sequence[Tensor] | None = None,
    ) -> CapturedAttention:
        """Run a layer on every batch up to the end of an attention module, with the source's weights in it.

        Args:
            layer: the next one.
            name: of the attention module in the checkpoint.
            weights: those of the attention modules before it in the layer.
            streams: what `advance` returned for the source; by default this stream is the source.

        Raises:
            NonFiniteError: it gets or yields NaN or Inf.
        """
        walk = self._walk
        self._enter(layer)
        calls = []
        counting = self._error_weights(streams)
        for number in range(len(walk.batches)):
            with walk.watching(name, ends=True) as seen:
                self._run(layer, number, weights)
            hidden, (args, kwargs) = seen["hidden"], seen["arguments"]
            output = target = seen["output"].reshape(*hidden.shape[:-1], -1)
            if streams is not None:
                target = (
                    output
                    + (streams[number] - seen["stream"]).reshape(output.shape)
                    / walk.places[name].factor
                )
            check_finite(name, hidden, output, target)
            counts = counting[number] if streams is not None else output.new_ones(output.shape[:-1])
            counts, batch = counts.reshape(output.shape[:-1]), walk.numbers[number]
            call = AttentionCall(
                hidden, args, kwargs, output, target, counts, batch, walk.all_rows[batch]
            )
            calls.append(call)
        return CapturedAttention(
            name, walk.module(name), walk.projection, calls, len(walk.all_rows)
        )

    @staticmethod
    def _error_weights(streams: Sequence[Tensor] | None) -> list[Tensor]:
        """How much an error counts at each position of the source's residual streams: 1, and less in a massive state, which
        a norm divides by its length before anything reads it.
        """
        if streams is None:
            return []
        lengths = [stream.float().norm(dim=-1) for stream in streams]
        known = gathered([each.flatten().cpu() for each in lengths])
        median = torch.cat([each for process in known for each in process]).median()
        return [_relative_weights(each, median.to(each.device)) for each in lengths]

    def _enter(self, layer: WalkedLayer) -> None:
        """Go on to the stack of a layer."""
        if self._hidden and layer.stack not in self._hidden[0]:
            recorded = [self._walk.record(*each) for each in enumerate(self._hidden)]
            self._arguments = [arguments for _, arguments in recorded]
            for states, (hidden, _) in zip(self._hidden, recorded, strict=True):
                states[layer.stack] = hidden

    def _run(self, layer: WalkedLayer, number: int, weights: Replacements) -> Any:
        args, kwargs = self._arguments[number][layer.name]
        with self._walk.running() as context:
            for installed in weights.values():
                context.enter_context(installed())
            return layer.module(self._hidden[number][layer.stack], *args, **kwargs)

    def norms(self, stack: str) -> tuple[float, float]:
        """How long hidden states are, where this stream is in a stack: those at the first positions on average, and all
        others.
        """
        states = [hidden[stack].float().norm(dim=-1) for hidden in self._hidden]
        first = torch.cat([norms[:, 0] for norms in states])
        others = torch.cat([norms[:, 1:].flatten() for norms in states])
        return float(first.mean()), float(others.mean())

    def logits(self, number: int) -> Tensor:
        """The logits [B, L, vocabulary] of a batch, once all layers are passed."""
        logits: Tensor = self._walk.run(number, self._hidden[number]).logits
        return logits


def _relative_weights(lengths: Tensor, median: Tensor) -> Tensor:
    """1, and for massive states the square of their median length over theirs."""
    return torch.where(lengths > MASSIVE * median, (median / lengths).square(), 1.0)


def list_elements(model: Any, modules: Iterable[str]) -> dict[str, str]:
    """The layers of a model: the elements of the outermost module lists that hold attention modules, and the list of each.

    Args:
        model: a loaded model.
        modules: the attention modules' names in it.
    """
    found: dict[str, str] = {}
    for name in modules:
        parents = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
        lists = [
            each for each in parents if isinstance(model.get_submodule(each), torch.nn.ModuleList)
        ]
        for stack in lists[:1]:
            found |= {
                f"{stack}.{number}": stack for number in range(len(model.get_submodule(stack)))
            }
    return found


def check_finite(name: str, *tensors: Tensor) -> None:
    """Refuse what the loaded source yields where it can't be computed with.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
    """
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise NonFiniteError(
            f"the source yields NaN or Inf at {name} on the calibration text: check that its logits on this text are finite"
        )


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
