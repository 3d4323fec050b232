"""Runs the source and the student side by side over all batches, from one attention module to the next.

Both are one tree of modules and share all weights except those of attention. Each batch of each model is an ordinary
call of the whole model in a separate greenlet, which pauses when it enters one of the named attention modules. The
runner therefore needs no knowledge of how a model chains its layers, computes every layer once, and keeps one paused
call per batch and model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from gqa_convert.conversion.fit.lockstep.captured_module import Call, CapturedModule
from gqa_convert.conversion.fit.lockstep.forward_pass import Arrival, Batch, ForwardPass
from gqa_convert.conversion.fit.lockstep.greenlets import Paused, current, pause
from gqa_convert.conversion.fit.lockstep.module_names import encoder_of, find_modules, layers_without
from gqa_convert.conversion.fit.lockstep.offloading import offloaded_weights, running_device
from gqa_convert.conversion.fit.lockstep.padding import as_counted, masks_of
from gqa_convert.conversion.fit.lockstep.residual_stream import Observer, Route
from gqa_convert.conversion.fit.lockstep.spilling import Spill
from gqa_convert.conversion.fit.lockstep.substitution import replaced, wrapped_forward
from gqa_convert.errors import UnsupportedFamilyError


class LockstepRunner:
    """Runs all forward passes of the source and the student; a context manager that ends paused passes on exit.

    Iterate over it to get the attention modules in the order in which the model reaches them, call `commit` on each,
    and call `logits` after the last.

    Args:
        model: a loaded model in evaluation mode. Its modules are patched until `close`.
        batches: the inputs of the model, one mapping per batch.
        names: the attention modules' names in the checkpoint.
        spill: an existing folder for the tensors of paused passes (on the CPU); None to keep them in memory.
        paired: whether to run both the source and the student. Otherwise each batch has a single pass with the
            committed weights, which represents both.
        precision: the context of all forward passes.
        on_batch: called with the number of batches that have reached the next module, and the number of all.

    Raises:
        ConfigError: the model has no such module.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Batch],
        names: Sequence[str],
        *,
        spill: Path | None = None,
        paired: bool = True,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        on_batch: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._model, self._spill, self._precision, self._on_batch = model, spill, precision, on_batch
        self._weights = frozenset(
            tensor.untyped_storage().data_ptr()
            for tensor in (*model.parameters(), *model.buffers())
            if not tensor.is_meta
        )
        self._names = find_modules(model, names)
        self._passes: dict[object, ForwardPass] = {}
        self._stack = ExitStack()
        self._offloaded = offloaded_weights(model)
        if self._offloaded is not None:
            self._stack.enter_context(self._offloaded.held())
        self._stack.callback(self._end)
        for wanted, name in self._names.items():
            self._wrap(name, partial(self._stopping, wanted))
        if self._offloaded is not None:
            for name in layers_without(model, self._names.values()):
                self._wrap(name, partial(self._stopping, None))
        encoder = encoder_of(model)
        if encoder and not any(name.startswith(f"{encoder}.") for name in self._names.values()):
            self._wrap(encoder, lambda _, forward: self._sharing(forward))
        sources = [self._open(batch) for batch in batches]
        self._pairs: list[tuple[ForwardPass, ...]] = [
            (source, self._open(source.batch, source)) if paired else (source,) for source in sources
        ]
        self._left = dict.fromkeys(names)
        self._passes_per_batch = 2 if paired else 1
        self._answers: tuple[Mapping[str, Tensor] | None, ...] = (None,) * self._passes_per_batch
        self._routes: dict[str, Route] = {}
        self._measured = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all passes and restore the model."""
        self._stack.close()

    def _end(self) -> None:
        for each in self._passes.values():
            each.paused.close()
        self._passes.clear()
        self._pairs = []

    def _wrap(self, name: str, wrapper: Callable[[Any, Any], Any]) -> None:
        module = self._model.get_submodule(name)
        self._stack.enter_context(wrapped_forward(module, wrapper(module, module.forward)))

    def _open(self, batch: Batch, twin: ForwardPass | None = None) -> ForwardPass:
        device = running_device(self._model)
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        paused = Paused(lambda: self._model(**moved, use_cache=False))
        forward = ForwardPass(moved, paused, twin)
        if self._spill is not None:
            forward.spill = Spill(self._spill, twin.spill if twin else None)
        self._passes[paused.identity] = forward
        return forward

    def _stopping(self, name: str | None, module: Any, forward: Any) -> Any:
        """Wrap a module's `forward` so that it pauses first and then runs with the weights from the answer."""

        def stopping(*args: Any, **kwargs: Any) -> Any:
            if current() not in self._passes:
                return forward(*args, **kwargs)
            parameters = pause(Arrival(name, args, kwargs))
            with replaced(module, parameters):
                return forward(*args, **kwargs)

        return stopping

    def _sharing(self, forward: Any) -> Any:
        """Wrap the `forward` of an encoder in which nothing is merged, so that the student reuses the source's output."""

        def sharing(*args: Any, **kwargs: Any) -> Any:
            running = self._passes.get(current())
            if running is None:
                return forward(*args, **kwargs)
            if running.twin is None:
                running.encoded = forward(*args, **kwargs)
                return running.encoded
            while running.twin.encoded is None:
                pause(Arrival())
            encoded, running.twin.encoded = running.twin.encoded, None
            return encoded

        return sharing

    def __iter__(self) -> Iterator[CapturedModule]:
        """The attention modules in the order in which the model reaches them. Weights that are committed to a module
        apply once the iteration continues.

        Raises:
            UnsupportedFamilyError: a module is not reached, or is reached twice.
            RuntimeError: batches reach different modules.
            BaseException: any error of the model.
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
                module = self._captured(name)
                yield module
                source = module.parameters()
                self._answers = (source, source | module.committed)[-self._passes_per_batch :]
                module.calls.clear()
        except BaseException:
            self.close()
            raise

    def _measure(self) -> None:
        """Find the tensor that each attention output is added to, by one pass of the source over the first sequence,
        and record that tensor in every later pass.
        """
        if not self._pairs or self._measured:
            return
        self._measured = True
        batch = self._pairs[0][0].batch
        rows = min(tensor.shape[0] for tensor in batch.values())
        forward = self._open(
            {name: tensor[:1] if tensor.shape[0] == rows else tensor for name, tensor in batch.items()}
        )
        observers = {wanted: Observer(name) for wanted, name in self._names.items()}
        with ExitStack() as stack:
            for observer in observers.values():
                observer.watch(self._model, lambda hook: stack.callback(hook.remove))
            self._proceed(forward, None)
            while forward.arrival is not None:
                self._proceed(forward, self._parameters(forward.arrival.name) if forward.arrival.name else {})
                self._release()
        del self._passes[forward.paused.identity]
        self._routes = {name: observer.route for name, observer in observers.items() if observer.route is not None}
        for name, route in self._routes.items():
            module = self._model.get_submodule(route.module)
            self._stack.callback(module.register_forward_pre_hook(self._noting(name, route), with_kwargs=True).remove)

    def _noting(self, name: str, route: Route) -> Any:
        def noting(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = self._passes.get(current())
            if forward is not None:
                forward.noted[name] = route.taken(args, kwargs)

        return noting

    def _parameters(self, name: str) -> dict[str, Tensor]:
        """The source's parameters of a captured module, by their names inside it."""
        module = self._model.get_submodule(self._names[name])
        if self._offloaded is not None:
            return self._offloaded.parameters(module)
        return {key: tensor.detach() for key, tensor in module.named_parameters()}

    def _advance(self) -> str | None:
        """Advance all passes to the next attention module; returns its name, or None at the end."""
        while True:
            for done, pair in enumerate(self._pairs):
                self._on_batch(done, len(self._pairs))
                for forward, answer in zip(pair, self._answers, strict=True):
                    self._proceed(forward, answer)
                    forward.move(self._weights)
            self._release()
            arrivals = [forward.arrival for pair in self._pairs for forward in pair]
            reached = {arrival.name if arrival else "the end" for arrival in arrivals}
            if len(reached) != 1:
                raise RuntimeError(
                    f"batches have reached different modules: {', '.join(sorted(str(name) for name in reached))}"
                )
            if arrivals[0] is None or arrivals[0].name is not None:
                return arrivals[0].name if arrivals[0] else None
            self._answers = ({},) * self._passes_per_batch

    def _proceed(self, forward: ForwardPass, answer: Mapping[str, Tensor] | None) -> None:
        with self._precision():  # a state of the thread, which the greenlet shares until it pauses
            forward.advance(answer)

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

    def _call(self, forward: ForwardPass) -> Call:
        arrival = forward.arrival
        assert arrival is not None
        assert arrival.name is not None
        added_to = forward.noted.pop(arrival.name, None)
        call = Call(args=arrival.args, kwargs=arrival.kwargs, counted=None, states_counted=None, added_to=added_to)
        query_mask, key_mask = masks_of(
            forward.batch,
            self._names[arrival.name],
            encoder_decoder=self._model.config.is_encoder_decoder,
            cross=call.states is not call.hidden,
        )
        call.counted, call.states_counted = as_counted(query_mask, call.hidden), as_counted(key_mask, call.states)
        return call

    def logits(self, numbers: Iterable[int] | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The logits [B, L, vocabulary] of the source and the student, batch after batch, once all modules are done.

        Args:
            numbers: of the batches; by default all.

        Raises:
            RuntimeError: the iteration has not reached all modules.
        """
        try:
            if self._left:
                raise RuntimeError(
                    f"the runner has not reached {', '.join(self._left)} yet: iterate over it to the end first"
                )
            for pair in self._pairs if numbers is None else [self._pairs[number] for number in numbers]:
                logits = []
                for forward, answer in zip(pair, self._answers, strict=True):
                    self._proceed(forward, answer)
                    while forward.arrival is not None:
                        if forward.arrival.name is not None:
                            raise RuntimeError(f"{forward.arrival.name} was reached twice")
                        self._release()
                        self._proceed(forward, {})
                    logits.append(forward.result.logits)
                    forward.result = None
                yield logits[0], logits[-1]
        except BaseException:
            self.close()
            raise


class _DroppingCalls(list[tuple[Call, Call]]):
    """Calls whose tensors leave the resident memory when the next pair is requested."""

    def __init__(self, pairs: list[tuple[Call, Call]], spills: list[list[Spill]]) -> None:
        super().__init__(pairs)
        self._spills = spills

    def __iter__(self) -> Iterator[tuple[Call, Call]]:
        for pair, spills in zip(super().__iter__(), self._spills, strict=False):
            yield pair
            for spill in spills:
                spill.drop()
