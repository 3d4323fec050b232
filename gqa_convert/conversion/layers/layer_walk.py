"""Walks through a loaded model layer by layer, with the source and students whose attention has
other weights.

One ordinary pass over a little text surveys the model: in which order its layers are called, what
they return, and where attention's output enters the residual stream. Then each batch is shown to
the model once, to record what every layer is called with besides hidden states; layers that return
nothing but hidden states are not computed for this. From there on, each `Stream` runs one layer at
a time on the hidden states that it keeps. A student's layers read the arguments that the source's
do, except those that come from an encoder, which each stream makes of its own encoder's output.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gqa_convert.conversion.calibration.streams import Batch, tokens_of
from gqa_convert.errors import NonFiniteError, UnsupportedFamilyError
from gqa_convert.processes import gathered
from gqa_convert.sharding import idle_passes, whole_weights

from .attention_calls import MASSIVE, AttentionCall, CapturedAttention, own_rows
from .model_loading import find_modules, list_elements, running_device, wrapped_forward
from .residual_stream import StreamPlace, find_stream, first_tensor, on_passing

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a layer or an attention module is called with behind hidden states, by position and by name.
"""
Recorded = tuple[Tensor, dict[str, Arguments]]
"""The hidden states that enter a stack of layers, and what each of its layers is called with behind
them, by name.
"""
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
        others: what it returned behind hidden states when the model was surveyed; None where it
            returns a tensor.
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
        batches: the inputs of the model, one mapping per batch; several processes divide their
            rows.
        names: the attention modules' names in the checkpoint.
        projection: the name of the output projection inside each of them.
        precision: the context of all forward passes.

    Raises:
        ConfigError: the model has no such module.
        UnsupportedFamilyError: the model does not call each attention module once, each in a layer
            of a list.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Batch],
        names: Sequence[str],
        projection: str,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.projection, self.precision = model, projection, precision
        self.device = running_device(model)
        self.all_rows = [len(tokens_of(batch)) for batch in batches]
        # what this process reads, and the numbers of these batches
        own = own_rows(batches)
        self.numbers = [*own]
        self.batches = [self._moved(batch) for batch in own.values()]
        self._few = self._moved(
            {name: tensor[:1, :_SURVEYED] for name, tensor in batches[0].items()}
        )
        self.modules = find_modules(model, names)
        self.places: dict[str, StreamPlace] = {}
        self.layers: list[WalkedLayer] = []
        self._survey()
        self.stacks = list(dict.fromkeys(layer.stack for layer in self.layers))

    def _moved(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def module(self, name: str) -> Any:
        """An attention module, by its name in the checkpoint."""
        return self.model.get_submodule(self.modules[name])

    def _survey(self) -> None:
        """Find the layers of all stacks in the order of their calls, by an ordinary pass over a few
        tokens.
        """
        called: list[str] = []
        with torch.no_grad(), ExitStack() as context:
            for name in self.modules:
                # the hook's arguments come behind
                note = partial(_note, called, name)
                context.enter_context(self.module(name).register_forward_pre_hook(note))
            for name, stack in list_elements(self.model, self.modules.values()).items():
                module = self.model.get_submodule(name)
                look = partial(self._look, called, WalkedLayer(name, module, stack, (), None))
                context.enter_context(wrapped_forward(module, partial(look, module.forward)))
            self.model(**self._few, use_cache=False)
        found = [name for layer in self.layers for name in layer.attention]
        for name in self.modules:
            if found.count(name) != 1:
                raise UnsupportedFamilyError(
                    f"running the model on text calls {name} {found.count(name)} times in its "
                    "lists of layers, not once: it can't be calibrated; choose --method factor "
                    "without calibration text"
                )

    def _look(
        self, called: list[str], layer: WalkedLayer, forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer as the model does, and add what it tells to `layers` and `places`.

        Args:
            called: gets the names of attention modules when they are called.
            layer: of which only the name and the place are known.
            forward: the layer's own.
        """
        called.clear()
        with whole_weights(layer.module), wrapped_forward(layer.module, forward):
            output = forward(*args, **kwargs)
            inside = tuple(called)
            again = partial(layer.module, *args, **kwargs)
            for name in inside:
                projection = f"{self.modules[name]}.{self.projection}"
                self.places[name] = find_stream(self.model, layer.name, projection, again)
        others = None if isinstance(output, Tensor) else tuple(output)[1:]
        self.layers.append(layer._replace(attention=inside, others=others))
        return output

    def streams(self, count: int, *, on_host: bool = False) -> "list[Stream]":
        """New streams at the first layer.

        Args:
            count: of streams.
            on_host: whether they keep hidden states in the machine's memory between layers.
        """
        own = len(self.batches)
        # a layer that is computed for what it returns is gathered by all processes together
        passes = [*self.batches, *[self._few] * idle_passes(self.model, own)]
        recorded = [self.record(batch, {}) for batch in passes][:own]
        return [Stream(self, recorded, on_host=on_host) for _ in range(count)]

    def record(self, batch: Batch, finished: Mapping[str, Tensor]) -> Recorded:
        """What enters the next stack on a batch.

        Args:
            batch: on the model's device.
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
            if not layer.others:
                return layer.returning(hidden)
            with whole_weights(layer.module):
                return forward(*args, **kwargs)

        with suppress(_Reached), ExitStack() as context:
            for layer in layers:
                forward = partial(recording, layer, layer.module.forward)
                context.enter_context(wrapped_forward(layer.module, forward))
            self.run(batch, finished)
        return entering[0], recorded

    def run(self, batch: Batch, finished: Mapping[str, Tensor]) -> Any:
        """Run the model on a batch, where the layers of finished stacks return what leaves their
        stack.

        Args:
            batch: on the model's device.
            finished: the hidden states that leave each of these stacks.
        """
        leaving = self._moved(finished)
        with torch.no_grad(), self.precision(), ExitStack() as context:
            for layer in self.layers:
                if layer.stack in leaving:
                    forward = partial(_returned, layer.returning(leaving[layer.stack]))
                    context.enter_context(wrapped_forward(layer.module, forward))
            return self.model(**batch, use_cache=False)

    @contextmanager
    def watching(self, name: str, *, ends: bool = False) -> Iterator[dict[str, Any]]:
        """A context that notes of the next call of an attention module: its `hidden` states and
        other `arguments`, the `output` of its projection, and the residual `stream` with this, or
        the output where that becomes no part of the stream.

        Args:
            name: of the module in the checkpoint.
            ends: end the pass when everything is known.
        """
        seen: dict[str, Any] = {}

        def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen["hidden"], seen["arguments"] = hidden_first(args, kwargs)

        def arrive(stream: Tensor) -> None:
            if "output" in seen:  # the module may be called before attention too
                seen["stream"] = stream
                if ends:
                    raise _Reached

        place, module = self.places[name], self.module(name)
        project = partial(seen.__setitem__, "output")
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
        on_host: whether hidden states are kept in the machine's memory.
    """

    def __init__(
        self, walk: LayerWalk, recorded: Sequence[Recorded], *, on_host: bool = False
    ) -> None:
        self._walk = walk
        self._place = torch.device("cpu") if on_host else walk.device
        """Where hidden states are kept."""
        self._hidden: list[dict[str, Tensor]] = [{} for _ in recorded]
        """Of each batch by stack: what leaves the finished ones, and where it is in the last."""
        self._arrive(walk.stacks[0], recorded)

    def _arrive(self, stack: str, recorded: Sequence[Recorded]) -> None:
        """Begin a stack with what enters it on each batch."""
        self._arguments = [_with_own_mappings(arguments) for _, arguments in recorded]
        for states, (hidden, _) in zip(self._hidden, recorded, strict=True):
            states[stack] = hidden.to(self._place)

    def advance(
        self, layer: WalkedLayer, weights: Replacements = SOURCE, watch: Sequence[str] = ()
    ) -> dict[str, list[Tensor]]:
        """Run a layer on every batch.

        Args:
            layer: the next one.
            weights: those of a student's attention modules in it.
            watch: names of attention modules in it, as the checkpoint has them.

        Returns:
            By the names of `watch`, for each batch the residual stream with attention's
            contribution; the contribution alone where it becomes no part of the stream.
        """
        streams: dict[str, list[Tensor]] = {name: [] for name in watch}
        self._enter(layer)
        for number, states in enumerate(self._hidden):
            with ExitStack() as context:
                seen = {name: context.enter_context(self._walk.watching(name)) for name in watch}
                output = self._run(layer, number, weights)
            states[layer.stack] = first_tensor(output).to(self._place)
            for name in watch:
                streams[name].append(seen[name]["stream"].to(self._place))
        return streams

    def attention(
        self,
        layer: WalkedLayer,
        name: str,
        weights: Replacements = SOURCE,
        streams: Sequence[Tensor] | None = None,
    ) -> CapturedAttention:
        """Run a layer on every batch up to the end of an attention module, with the source's
        weights in it.

        Args:
            layer: the next one.
            name: of the attention module in the checkpoint.
            weights: those of the attention modules before it in the layer.
            streams: what `advance` returned for the source; by default this stream is the source.

        Raises:
            NonFiniteError: it gets or yields NaN or Inf.
        """
        walk, calls = self._walk, []
        self._enter(layer)
        counting = [] if streams is None else _error_weights(streams)
        for number, batch in enumerate(walk.numbers):
            with walk.watching(name, ends=True) as seen:
                self._run(layer, number, weights)
            hidden, (args, kwargs) = seen["hidden"], seen["arguments"]
            output = target = seen["output"].reshape(*hidden.shape[:-1], -1)
            counts = output.new_ones(output.shape[:-1])
            if streams is not None:
                # what the student's residual stream misses
                missing = streams[number].to(walk.device) - seen["stream"]
                target = output + missing.reshape(output.shape) / walk.places[name].factor
                counts = counting[number].to(walk.device).reshape(counts.shape)
            check_finite(name, hidden, output, target)
            call = AttentionCall(
                hidden.to(self._place),
                args,
                kwargs,
                output.to(self._place),
                target.to(self._place),
                counts,
                batch,
                walk.all_rows[batch],
            )
            calls.append(call)
        return CapturedAttention(
            name, walk.module(name), walk.projection, calls, len(walk.all_rows)
        )

    def _enter(self, layer: WalkedLayer) -> None:
        """Go on to the stack of a layer."""
        if self._hidden and layer.stack not in self._hidden[0]:
            pairs = zip(self._walk.batches, self._hidden, strict=True)
            self._arrive(layer.stack, [self._walk.record(*pair) for pair in pairs])

    def _run(self, layer: WalkedLayer, number: int, weights: Replacements) -> Any:
        args, kwargs = self._arguments[number][layer.name]
        hidden = self._hidden[number][layer.stack].to(self._walk.device)
        with torch.no_grad(), self._walk.precision(), ExitStack() as context:
            for installed in weights.values():
                context.enter_context(installed())
            return layer.module(hidden, *args, **kwargs)

    def norms(self, stack: str) -> tuple[float, float]:
        """How long hidden states are, where this stream is in a stack: those at the first positions
        on average, and all others.
        """
        states = [hidden[stack].float().norm(dim=-1) for hidden in self._hidden]
        first = torch.cat([norms[:, 0] for norms in states])
        others = torch.cat([norms[:, 1:].flatten() for norms in states])
        return float(first.mean()), float(others.mean())

    def logits(self, number: int) -> Tensor:
        """The logits [B, L, vocabulary] of a batch, once all layers are passed."""
        walk = self._walk
        logits: Tensor = walk.run(walk.batches[number], self._hidden[number]).logits
        return logits


def _note(called: list[str], name: str, *_: Any) -> None:
    called.append(name)


def _returned(output: Any, *_: Any, **__: Any) -> Any:
    return output


def _error_weights(streams: Sequence[Tensor]) -> list[Tensor]:
    """How much an error counts at each position of the source's residual streams: 1, and in a
    massive state, which a norm divides by its length before anything reads it, the square of the
    median length over its own.
    """
    lengths = [stream.float().norm(dim=-1) for stream in streams]
    known = gathered([each.flatten().cpu() for each in lengths])
    median = torch.cat([*chain.from_iterable(known)]).median()
    found = []
    for each in lengths:
        middle = median.to(each.device)
        found.append(torch.where(each > MASSIVE * middle, (middle / each).square(), 1.0))
    return found


def check_finite(name: str, *tensors: Tensor) -> None:
    """Refuse what the loaded source yields where it can't be computed with.

    Raises:
        NonFiniteError: a tensor holds NaN or Inf.
    """
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise NonFiniteError(
            f"the source yields NaN or Inf at {name} on what --calibration names: check that its "
            "logits on it are finite"
        )


def hidden_first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Arguments]:
    """Hidden states, which are the first argument of every layer and of every attention module, and
    the other arguments.
    """
    others = dict(kwargs)
    if "hidden_states" in others:
        return others.pop("hidden_states"), (args, others)
    return args[0], (args[1:], others)


def _with_own_mappings(recorded: Mapping[str, Arguments]) -> dict[str, Arguments]:
    """Arguments of a stream's own: where layers pass keys and values to later layers in a mapping,
    one that no other stream writes to.
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
