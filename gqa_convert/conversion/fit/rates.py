"""How fast this machine computes: the products of a layer of given sizes, timed for a second or two.

Large layers are timed in part: fewer heads, a narrower MLP and a part of the vocabulary, of which the whole takes
proportionally longer.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

_OPERATIONS = {"cpu": 2e9, "cuda": 2e11}
"""Floating-point operations of a timed product, about; a fraction of a second each."""
_GROUP = 4
"""The most query heads that are timed beyond that."""
_COLUMNS = 512
"""The fewest columns of an MLP that are timed, if it has as many."""
_REPEATED = 0.15
"""Seconds: shorter computations are timed several times, and the fastest counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """The sizes of a model's layers. Where layers differ, of their mean."""

    hidden_size: int
    heads: int
    kv_heads: int
    trained_kv_heads: int
    """Of which the gradient stages make products."""
    key_head_dim: int
    value_head_dim: int
    feed_forward: int
    """Parameters of a layer outside its attention that a token uses."""
    vocabulary: int
    block: int
    """Tokens of a block of text."""
    batch: int
    """Tokens of a batch of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per token in one layer, and per floating-point operation."""

    attention: float
    """The attention module's forward pass."""
    attention_gradient: float
    """Forward and backward, with gradients to its weights."""
    feed_forward: float
    feed_forward_gradient: float
    """Forward and backward, with gradients to the states alone."""
    logits: float
    """The language-model head."""
    logits_gradient: float
    """The head and the divergence of two distributions, forward and backward."""
    single: float
    """Per operation of a product in float32."""
    double: float
    """Per operation of a product in float64."""


def measured_rates(
    sizes: LayerSizes, device: str, precision: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Rates:
    """Time the products of a layer on a device.

    Args:
        sizes: of the layer.
        device: that runs them.
        precision: of products with activations.
    """
    import torch

    place = torch.device(device)
    budget = _OPERATIONS[place.type]
    clock = _Clock(place)
    length, rows = sizes.block, max(1, sizes.batch // sizes.block)
    single = _product(clock, sizes, budget, torch.float32, place)
    double = double_rate() if place.type == "cpu" else _product(clock, sizes, budget, torch.float64, place)
    with torch.enable_grad(), precision():
        attention = _attention(sizes, sizes.kv_heads, rows, length, budget, place)
        trained = _attention(sizes, sizes.trained_kv_heads, rows, length, budget, place)
        feed_forward = _feed_forward(sizes, budget, place)
        logits, divergence = _logits(sizes, budget, place)
        return Rates(
            attention=clock.seconds(attention.forward) * attention.scale,
            attention_gradient=clock.seconds(trained.gradient) * trained.scale,
            feed_forward=clock.seconds(feed_forward.forward) * feed_forward.scale,
            feed_forward_gradient=clock.seconds(feed_forward.gradient) * feed_forward.scale,
            logits=clock.seconds(logits.forward) * logits.scale,
            logits_gradient=clock.seconds(divergence.gradient) * divergence.scale,
            single=single,
            double=double,
        )


def double_rate() -> float:
    """Seconds per operation of a product of numpy arrays in float64."""
    return product_rate("float64", 384)


def product_rate(dtype: str, size: int) -> float:
    """Seconds per operation of a product of square numpy arrays: the best of five.

    Args:
        dtype: of the arrays, as numpy names it.
        size: rows and columns.
    """
    import numpy as np

    array = np.random.default_rng(0).standard_normal((size, size)).astype(dtype)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        array @ array
        best = min(best, time.perf_counter() - began)
    return best / (2 * size**3)


@dataclass(frozen=True, slots=True)
class _Timed:
    """A computation, and by how much its time is multiplied to get seconds per token of the whole."""

    compute: Callable[[], Any]
    scale: float

    def forward(self) -> None:
        import torch

        with torch.no_grad():
            self.compute()

    def gradient(self) -> None:
        self.compute().square().mean().backward()


class _Clock:
    """Times computations on a device: on a CPU the time of its cores, so that other work on the machine does not count."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def _now(self) -> float:
        """The time in seconds."""
        import torch

        if self._device.type == "cpu":
            return time.process_time() / int(torch.get_num_threads())
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self, compute: Callable[[], Any]) -> float:
        """The seconds of a computation; the fastest of several where it is short, the first of which warms up."""
        best, total, count = float("inf"), 0.0, 0
        while count < 1 or (count < 6 and total < _REPEATED):
            began = self._now()
            compute()
            taken = self._now() - began
            best, total, count = min(best, taken), total + taken, count + 1
        return best


def _attention(sizes: LayerSizes, kv_heads: int, rows: int, length: int, budget: float, device: Any) -> _Timed:
    """Projections, rotary positions, causal attention and the output projection, for some of the heads: those of one K/V
    head or more, as far as these are few.
    """
    import torch
    from torch.nn import functional

    from gqa_convert.attention.causal_training import causal_attention
    from gqa_convert.conversion.fit.training_attention import is_faster

    ratio = max(1, round(sizes.heads / kv_heads))
    widths = sizes.key_head_dim + sizes.value_head_dim
    per_head = 2 * rows * length * widths * (sizes.hidden_size * (1 + 1 / ratio) + length)
    heads = max(min(ratio, _GROUP), min(sizes.heads, int(budget / per_head)))
    kv_heads = max(1, heads // ratio)
    heads = heads // kv_heads * kv_heads
    rows = rows if heads * per_head <= budget else 1
    states = torch.randn(rows, length, sizes.hidden_size, device=device)

    def weight(count: int, head_dim: int) -> Any:
        made = torch.randn(count * head_dim, sizes.hidden_size, device=device) * sizes.hidden_size**-0.5
        return made.requires_grad_()

    queries, keys = weight(heads, sizes.key_head_dim), weight(kv_heads, sizes.key_head_dim)
    values, outputs = weight(kv_heads, sizes.value_head_dim), weight(heads, sizes.value_head_dim)
    angles = torch.randn(length, sizes.key_head_dim, device=device)
    cosine, sine = angles.cos(), angles.sin()

    def split(matrix: Any, count: int) -> Any:
        return (states @ matrix.T).unflatten(-1, (count, -1)).transpose(1, 2)

    def rotated(rows: Any) -> Any:
        return rows * cosine + rows.roll(sizes.key_head_dim // 2, -1) * sine

    def compute() -> Any:
        read, key, value = rotated(split(queries, heads)), rotated(split(keys, kv_heads)), split(values, kv_heads)
        ratio = heads // kv_heads
        key, value = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
        if is_faster(read, key, value):
            found = causal_attention(read, key, value)
        else:
            found = functional.scaled_dot_product_attention(read, key, value, is_causal=True)
        return found.transpose(1, 2).flatten(2) @ outputs

    return _Timed(compute, sizes.heads / heads / (rows * length))


def _feed_forward(sizes: LayerSizes, budget: float, device: Any) -> _Timed:
    """A gated MLP of as many parameters, for some of its columns.

    They are not so few that passes over the states, which take as long whatever the columns, outweigh the products.
    """
    import torch
    from torch.nn import functional

    whole = max(1, sizes.feed_forward // (3 * sizes.hidden_size))
    columns = max(min(whole, _COLUMNS), min(whole, int(budget / (6 * sizes.hidden_size * sizes.batch))))
    states = torch.randn(sizes.batch, sizes.hidden_size, device=device).requires_grad_()
    gate, up, down = (
        torch.randn(columns, sizes.hidden_size, device=device) * sizes.hidden_size**-0.5 for _ in range(3)
    )

    def compute() -> Any:
        return (functional.silu(states @ gate.T) * (states @ up.T)) @ down

    return _Timed(compute, whole / columns / sizes.batch)


def _logits(sizes: LayerSizes, budget: float, device: Any) -> tuple[_Timed, _Timed]:
    """The language-model head, alone and with the divergence, for a part of the vocabulary."""
    import torch

    rows = min(sizes.batch, 256)
    words = max(1, min(sizes.vocabulary, int(budget / (2 * sizes.hidden_size * rows))))
    states = torch.randn(rows, sizes.hidden_size, device=device).requires_grad_()
    head = torch.randn(words, sizes.hidden_size, device=device) * sizes.hidden_size**-0.5
    teacher = torch.randn(rows, words, device=device).log_softmax(-1)

    def divergence() -> Any:
        student = (states @ head.T).log_softmax(-1)
        return (teacher.exp() * (teacher - student)).sum(-1)

    scale = max(1, sizes.vocabulary) / words / rows
    return _Timed(lambda: states @ head.T, scale), _Timed(divergence, scale)


def _product(clock: _Clock, sizes: LayerSizes, budget: float, dtype: Any, device: Any) -> float:
    """Seconds per operation of the product of a batch's states with themselves."""
    import torch

    columns = max(1, min(sizes.hidden_size, int((budget / (2 * sizes.batch)) ** 0.5)))
    states = torch.randn(sizes.batch, columns, device=device, dtype=dtype)
    return clock.seconds(lambda: states.T @ states) / (2 * sizes.batch * columns**2)
