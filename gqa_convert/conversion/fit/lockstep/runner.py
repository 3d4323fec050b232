"""Source and student run side by side over all batches, from one attention module to the next.

Both are one tree of modules: all but the attention's weights are the same tensors. Each batch of each is an ordinary
call of the whole model in a greenlet of its own, which stops wherever it enters one of the modules asked for. So no
knowledge of how a model chains its layers is needed, every layer is computed once, and what is kept of a batch is one
paused call.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from gqa_convert.conversion.fit.lockstep.captured_module import Call, CapturedModule
from gqa_convert.conversion.fit.lockstep.greenlets import Paused, current, pause
from gqa_convert.conversion.fit.lockstep.module_names import find_modules
from gqa_convert.conversion.fit.lockstep.offloading import offloaded_weights
from gqa_convert.conversion.fit.lockstep.residual_stream import Observer, Route
from gqa_convert.conversion.fit.lockstep.spilling import Spill
from gqa_convert.conversion.fit.lockstep.substitution import replaced, wrapped_forward
from gqa_convert.errors import UnsupportedFamilyError

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What a forward pass says as it stops: where, and what that module was called with."""

    site: str | None = None
    """None where passes only wait for each other, so that weights are read once for all."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Forward:
    """A batch's pass through source or student."""

    batch: Batch
    paused: Paused
    twin: "_Forward | None" = None
    """The source's pass of the same batch, if this is the student's."""
    arrival: _Arrival | None = None
    result: Any = None
    encoded: Any = None
    """The encoder's output, until the student's pass takes it over."""
    spill: Spill | None = None
    noted: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that entered modules on the way to a site, by the site's name."""

    def advance(self, answer: Mapping[str, Tensor] | None) -> None:
        self.arrival = None  # else the frames' arguments would outlive them
        message = self.paused.resume(answer)
        self.arrival, self.result = (None, message) if self.paused.finished else (message, None)

    def move(self, kept: frozenset[int]) -> None:
        """What it keeps as it waits goes to files, if that is wanted."""
        if self.spill is not None:
            self.spill.take(
                self.paused.frame, [self.noted, list(self.encoded.values()) if self.encoded else None], kept
            )


class LockstepRunner:
    """All passes of source and student; a context manager, which ends those that wait.

    Args:
        model: a loaded model in evaluation mode. Its modules are patched until the end.
        batches: what the model is called with, each on its own: tensors by argument.
        sites: attention modules, as the checkpoint's tensors are named up to them.
        spill: an existing folder on a disk for what waiting passes keep, which is in memory otherwise; on the CPU only.
        paired: run source and student; else there is one pass of each batch, with what is committed, in the place of
            both.

    Raises:
        ConfigError: the model has no such module.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Batch],
        sites: Sequence[str],
        *,
        spill: Path | None = None,
        paired: bool = True,
    ) -> None:
        self._model, self._spill = model, spill
        self._weights = frozenset(
            tensor.untyped_storage().data_ptr()
            for tensor in (*model.parameters(), *model.buffers())
            if not tensor.is_meta
        )
        self._names = find_modules(model, sites)
        self._passes: dict[object, _Forward] = {}
        self._stack = ExitStack()
        self._offloaded = offloaded_weights(model)
        if self._offloaded is not None:
            self._stack.enter_context(self._offloaded.held())
        self._stack.callback(self._end)
        for site, name in self._names.items():
            self._wrap(name, partial(self._stopping, site))
        if self._offloaded is not None:
            for name in _layers(model, self._names.values()):
                self._wrap(name, partial(self._stopping, None))
        encoder = _encoder(model)
        if encoder and not any(name.startswith(f"{encoder}.") for name in self._names.values()):
            self._wrap(encoder, lambda _, forward: self._sharing(forward))
        sources = [self._open(batch) for batch in batches]
        self._pairs: list[tuple[_Forward, ...]] = [
            (source, self._open(source.batch, source)) if paired else (source,) for source in sources
        ]
        self._left = dict.fromkeys(sites)
        self._width = 2 if paired else 1
        self._answers: tuple[Mapping[str, Tensor] | None, ...] = (None,) * self._width
        self._routes: dict[str, Route] = {}
        self._measured = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all passes and leave the model as it was."""
        self._stack.close()

    def _end(self) -> None:
        for each in self._passes.values():
            each.paused.close()
        self._passes.clear()
        self._pairs = []

    def _wrap(self, name: str, wrapper: Callable[[Any, Any], Any]) -> None:
        module = self._model.get_submodule(name)
        self._stack.enter_context(wrapped_forward(module, wrapper(module, module.forward)))

    def _open(self, batch: Batch, twin: _Forward | None = None) -> _Forward:
        device = self._model.device if self._offloaded is None else self._offloaded.device
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        paused = Paused(lambda: self._model(**moved, use_cache=False))
        forward = _Forward(moved, paused, twin)
        if self._spill is not None:
            forward.spill = Spill(self._spill, twin.spill if twin else None)
        self._passes[paused.identity] = forward
        return forward

    def _stopping(self, site: str | None, module: Any, forward: Any) -> Any:
        """A module's `forward` that waits first, and then runs with the weights that it is given."""

        def stopping(*args: Any, **kwargs: Any) -> Any:
            if current() not in self._passes:
                return forward(*args, **kwargs)
            parameters = pause(_Arrival(site, args, kwargs))
            with replaced(module, parameters):
                return forward(*args, **kwargs)

        return stopping

    def _sharing(self, forward: Any) -> Any:
        """The `forward` of an encoder without sites, which the student takes from the source."""

        def sharing(*args: Any, **kwargs: Any) -> Any:
            running = self._passes.get(current())
            if running is None:
                return forward(*args, **kwargs)
            if running.twin is None:
                running.encoded = forward(*args, **kwargs)
                return running.encoded
            while running.twin.encoded is None:
                pause(_Arrival())
            encoded, running.twin.encoded = running.twin.encoded, None
            return encoded

        return sharing

    def __iter__(self) -> Iterator[CapturedModule]:
        """The sites in the order in which the model reaches them; what is committed there is in force once the next is
        asked for.

        Raises:
            UnsupportedFamilyError: a module is not reached, or one twice.
            RuntimeError: batches reach different modules.
            BaseException: whatever the model raises.
        """
        try:
            self._measure()
            while self._left:
                name = self._advance()
                if name not in self._left:
                    missed = next(iter(self._left))
                    raise UnsupportedFamilyError(
                        f"running the model on text does not call {missed} once ({name or 'the end'} came first): it can't be calibrated"
                    )
                del self._left[name]
                site = self._captured(name)
                yield site
                source = site.parameters()
                self._answers = (source, source | site.committed)[-self._width :]
                site.calls.clear()
        except BaseException:
            self.close()
            raise

    def _measure(self) -> None:
        """Find what attention's outputs are added to, by a pass of the source over the first sequence, and note that
        tensor from here on.
        """
        if not self._pairs or self._measured:
            return
        self._measured = True
        batch = self._pairs[0][0].batch
        rows = min(tensor.shape[0] for tensor in batch.values())
        forward = self._open(
            {name: tensor[:1] if tensor.shape[0] == rows else tensor for name, tensor in batch.items()}
        )
        observers = {site: Observer(name) for site, name in self._names.items()}
        with ExitStack() as stack:
            for observer in observers.values():
                observer.watch(self._model, lambda hook: stack.callback(hook.remove))
            forward.advance(None)
            while forward.arrival is not None:
                forward.advance(self._parameters(forward.arrival.site) if forward.arrival.site else {})
                self._release()
        del self._passes[forward.paused.identity]
        for site, observer in observers.items():
            if observer.route is not None:
                self._routes[site] = observer.route
                module = self._model.get_submodule(observer.route.module)
                self._stack.callback(
                    module.register_forward_pre_hook(self._noting(site, observer.route), with_kwargs=True).remove
                )

    def _noting(self, site: str, route: Route) -> Any:
        def noting(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = self._passes.get(current())
            if forward is not None:
                forward.noted[site] = route.taken(args, kwargs)

        return noting

    def _parameters(self, site: str) -> dict[str, Tensor]:
        """The source's, of one of the modules."""
        module = self._model.get_submodule(self._names[site])
        if self._offloaded is not None:
            return self._offloaded.parameters(module)
        return {key: tensor.detach() for key, tensor in module.named_parameters()}

    def _advance(self) -> str | None:
        """All passes go on to the next site, whose name is returned; None if they have come to the end."""
        while True:
            for pair in self._pairs:
                for forward, answer in zip(pair, self._answers, strict=True):
                    forward.advance(answer)
                    forward.move(self._weights)
            self._release()
            arrivals = [forward.arrival for pair in self._pairs for forward in pair]
            reached = {arrival.site if arrival else "the end" for arrival in arrivals}
            if len(reached) != 1:
                raise RuntimeError(
                    f"batches have reached different modules: {', '.join(sorted(str(name) for name in reached))}"
                )
            if arrivals[0] is None or arrivals[0].site is not None:
                return arrivals[0].site if arrivals[0] else None
            self._answers = ({},) * self._width

    def _release(self) -> None:
        if self._offloaded is not None:
            self._offloaded.release()

    def _captured(self, name: str) -> CapturedModule:
        module = self._model.get_submodule(self._names[name])
        calls = [[self._call(forward) for forward in pair] for pair in self._pairs]
        pairs = [(each[0], each[-1]) for each in calls]
        route = self._routes.get(name)
        if self._spill is not None:
            pairs = _DroppingCalls(pairs, [[each.spill for each in pair if each.spill] for pair in self._pairs])
        return CapturedModule(name, module, self._parameters(name), pairs, route.output if route else None)

    def _call(self, forward: _Forward) -> Call:
        arrival = forward.arrival
        assert arrival is not None
        assert arrival.site is not None
        call = Call(
            args=arrival.args,
            kwargs=arrival.kwargs,
            counted=None,
            states_counted=None,
            added_to=forward.noted.pop(arrival.site, None),
        )
        own, read = self._masks(forward.batch, self._names[arrival.site], call.states is not call.hidden)
        call.counted, call.states_counted = _fitting_mask(own, call.hidden), _fitting_mask(read, call.states)
        return call

    def _masks(self, batch: Batch, module: str, cross: bool) -> tuple[Tensor | None, Tensor | None]:
        """Which positions count, of what asks and of what is read."""
        outer = batch.get("attention_mask")
        if not self._model.config.is_encoder_decoder or "encoder" in module.split("."):
            return outer, outer
        inner = batch.get("decoder_attention_mask")
        return inner, outer if cross else inner

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The logits [B, L, vocabulary] of source and student, batch after batch, once all sites are done.

        Raises:
            RuntimeError: sites are left.
        """
        try:
            if self._left:
                raise RuntimeError(f"{', '.join(self._left)} must be passed first")
            for pair in self._pairs:
                logits = []
                for forward, answer in zip(pair, self._answers, strict=True):
                    forward.advance(answer)
                    while forward.arrival is not None:
                        if forward.arrival.site is not None:
                            raise RuntimeError(f"{forward.arrival.site} was reached twice")
                        self._release()
                        forward.advance({})
                    logits.append(forward.result.logits)
                    forward.result = None
                yield logits[0], logits[-1]
        except BaseException:
            self.close()
            raise


class _DroppingCalls(list[tuple[Call, Call]]):
    """Calls whose tensors leave the resident memory when the next pair's turn has come."""

    def __init__(self, pairs: list[tuple[Call, Call]], spills: list[list[Spill]]) -> None:
        super().__init__(pairs)
        self._spills = spills

    def __iter__(self) -> Iterator[tuple[Call, Call]]:
        for pair, spills in zip(super().__iter__(), self._spills, strict=False):
            yield pair
            for spill in spills:
                spill.drop()


def _layers(model: Any, sites: Iterable[str]) -> list[str]:
    """The elements of the outermost lists of modules that hold none of the sites."""
    from torch.nn import ModuleList

    layers: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ModuleList) and not any(name.startswith(f"{layer}.") for layer in layers):
            layers += [f"{name}.{index}" for index in range(len(module))]
    return [layer for layer in layers if not any(f"{site}.".startswith(f"{layer}.") for site in sites)]


def _encoder(model: Any) -> str | None:
    """The name of an encoder-decoder model's encoder."""
    if not model.config.is_encoder_decoder:
        return None
    encoder = model.get_encoder()
    return next((name for name, module in model.named_modules() if module is encoder), None)


def _fitting_mask(mask: Tensor | None, states: Tensor) -> Tensor | None:
    """[B, L] bool, if the mask speaks of these states [B, L, d]."""
    if mask is None or mask.shape != states.shape[:2] or bool(mask.all()):
        return None
    return mask.to(torch.bool)
