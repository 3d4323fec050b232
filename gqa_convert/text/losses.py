"""Losses of uptraining as (sum, count) pairs, which are summed over micro-batches and processes before the division.

Shape legend: b batch, L positions, V vocabulary, n = b * L, k outcomes of a compressed distribution, d hidden_size.

Logits are the largest tensors of a step. They are processed in chunks of a few rows, which fit a CPU's cache. Sums and
softmaxes are float32 (float64 for float64 logits). The gradient is computed in the forward pass, so that each chunk is
read once and the teacher's logits need not be kept for the backward pass.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gqa_convert.errors import OptionError
from gqa_convert.text.labels import IGNORED
from gqa_convert.text.output_layers import OutputLayer, capped

_CHUNK: Final = 1 << 18
"""The number of logits in a CPU thread's chunk: 1 MiB in float32."""
_CHUNK_ON_ACCELERATOR: Final = 1 << 24
_POSITIONS, _PARTS = 1024, 8
"""Positions whose logits `linear_loss` makes at a time, and into how many parts it divides a batch at most: with more of them, reading the
layer and adding to its gradient would take longer than the products.
"""


AnyTeacher = TypeVar("AnyTeacher")


@dataclass(frozen=True, slots=True)
class Compressed:
    """Next-token distributions, reduced to the k likeliest tokens and the total probability of all others."""

    values: Tensor
    """[b, L, k], log-probabilities of the k likeliest tokens."""
    indices: Tensor
    """[b, L, k], ids of these tokens."""
    rest: Tensor
    """[b, L], the total probability of the other tokens."""
    temperature: float
    vocabulary: int
    """The number of tokens over which the probabilities were normalised."""


class CombinedLoss(NamedTuple):
    """A weighted loss and its parts, each a sum over positions; a part with weight 0 is not computed."""

    sum: Tensor
    count: Tensor
    lm: Tensor | None
    """The cross-entropy part. Like `kl` it has no gradient and is only logged."""
    kl: Tensor | None
    by_sequence: Tensor
    """[b], the loss of each sequence, without gradient."""


def lm_loss(logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, as (sum, count).

    Args:
        logits: [b, L, V].
        labels: [b, L], the token to predict at each position (already shifted), or -100.
        overwrite: see `combined_loss`.

    Returns:
        The sum over the labelled positions and their number, both float32.
    """
    loss = combined_loss(logits, labels, overwrite=overwrite)
    return loss.sum, loss.count


def kl_loss(
    student: Tensor,
    teacher: Tensor | Compressed,
    labels: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    *,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Forward KL(teacher || student) of the distributions at a temperature T, times T^2 (Hinton et al. 2015).

    Args:
        student: [b, L, V], logits.
        teacher: logits [b, L, V] or the result of `compress`; receives no gradient.
        labels: [b, L]; positions with -100 are ignored.
        temperature: T, which divides both logits.
        top_k: the number of the teacher's likeliest tokens to compare, all others being lumped together; see
            `compress`.
        overwrite: see `combined_loss`.

    Returns:
        The sum over the labelled positions and their number, both float32.
    """
    loss = combined_loss(
        student, labels, teacher, weight=1.0, temperature=temperature, top_k=top_k, overwrite=overwrite
    )
    return loss.sum, loss.count


def compress(teacher: Tensor, top_k: int, temperature: float = 1.0, vocabulary: int | None = None) -> Compressed:
    """The teacher's distributions in compressed form, so that its logits can be freed.

    The tokens outside the k likeliest are lumped into one outcome, whose probability is kept. The divergence of the
    lumped distributions never exceeds the full one, grows with k up to it, and is zero with zero gradient if student
    and teacher are equal. Renormalising over the k tokens would not have these properties: compared with the student's
    full distribution, the minimum is at a student without a tail; compared with the student's renormalised
    distribution, the student's tail could grow unpenalised.

    Args:
        teacher: [b, L, V], logits.
        top_k: k; capped at V.
        temperature: the temperature of the loss.
        vocabulary: the size of the student's vocabulary. If the two are padded to different sizes, the shared part is
            compared.
    """
    _check_options(0.0, temperature, top_k)
    shared = min(teacher.shape[-1], vocabulary or teacher.shape[-1])
    flat = teacher.detach().reshape(-1, teacher.shape[-1])
    chunks = [_lump(_log_softmax(part[:, :shared], temperature), top_k) for part in flat.split(_rows(flat))]
    values, indices, rest = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
    shape = teacher.shape[:-1]
    return Compressed(values.view(*shape, -1), indices.view(*shape, -1), rest.view(shape), temperature, shared)


def combined_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | Compressed | None = None,
    *,
    weight: float = 0.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    z_loss: float = 0.0,
    overwrite: bool = False,
) -> CombinedLoss:
    """Compute (1 - weight) * `lm_loss` + weight * `kl_loss` in one pass over the logits.

    Vocabularies padded to different sizes are compared in the part that they share; both distributions are conditioned
    on it.

    Args:
        logits: [b, L, V], the student's.
        labels: [b, L], next tokens, or -100 for positions to ignore.
        teacher: the teacher's logits [b, L, V], or compressed.
        weight: the weight of the divergence, from 0 (cross-entropy only) to 1 (divergence only).
        temperature: the temperature of the divergence.
        top_k: see `kl_loss`; only for uncompressed teachers.
        z_loss: the weight of log(Z)^2, which is added; Z is the sum of the exponentials of a position's logits. T5 and PaLM
            were pretrained with 1e-4, which keeps the logits from drifting.
        overwrite: write the gradient into the memory of the logits, which are lost when this function returns. The loss
            then needs no extra memory of the logits' size, and only one backward pass is possible.

    Returns:
        The sums over the labelled positions and their number, in float32.

    Raises:
        OptionError: an option is out of range, or the shapes do not match.
    """
    _check_options(weight, temperature, top_k)
    teacher = _weighted(teacher, weight)
    _check_shapes(logits, labels, teacher, temperature)
    differentiable = torch.is_grad_enabled() and logits.requires_grad
    terms = _Terms(weight, temperature, top_k, z_loss)
    return _combined(_Loss.apply(logits, labels, teacher, terms, differentiable, overwrite), labels, terms)


def linear_loss(
    states: Tensor,
    layer: OutputLayer,
    labels: Tensor,
    teacher: Tensor | None = None,
    teacher_layer: OutputLayer | None = None,
    *,
    weight: float = 0.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    z_loss: float = 0.0,
) -> CombinedLoss:
    """Compute what `combined_loss` does from the input of the output layer, without ever holding the logits of all positions.

    The logits of student and teacher are made for `positions_at_once` positions at a time, and the gradients with respect to the states and
    the layer in the same pass, as in Liger (Hsu et al. 2024, section 3.2) and for the divergence as well. Only one backward pass is
    possible. Products are computed in the dtype of the layer, or that of autocasting; the layer's gradient has the layer's dtype.

    Args:
        states: [b, L, d], the input of the student's output layer.
        layer: the student's output layer.
        labels: see `combined_loss`.
        teacher: [b, L, d'], the input of the teacher's output layer, or [b, L, V'], the teacher's logits.
        teacher_layer: the teacher's output layer; None if `teacher` contains logits.
        weight: see `combined_loss`, like the other options.
        temperature: see there.
        top_k: see there.
        z_loss: see there.

    Raises:
        OptionError: an option is out of range, or the shapes do not match.
    """
    _check_options(weight, temperature, top_k)
    teacher = _weighted(teacher, weight)
    _check_shapes(states, labels, teacher, temperature)
    terms = _Terms(weight, temperature, top_k, z_loss)
    found = _LinearLoss.apply(
        states, layer.weight, layer.bias, layer.cap, labels, teacher, teacher_layer, terms, torch.is_grad_enabled()
    )
    return _combined(found, labels, terms)


def positions_at_once(positions: int) -> int:
    """The number of positions, of a batch, whose logits `linear_loss` holds together."""
    return min(positions, max(_POSITIONS, -(-positions // _PARTS)))


class _Terms(NamedTuple):
    """The terms of a combined loss; see `combined_loss`."""

    weight: float
    temperature: float
    top_k: int | None
    z_loss: float


class _Found(NamedTuple):
    """The parts of the loss of rows, [rows, 1] each: the cross-entropy, the divergence divided by the square of the
    temperature, and the square of log(Z).
    """

    lm: Tensor
    kl: Tensor
    z: Tensor

    def totals(self, shape: torch.Size, terms: _Terms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The weighted sum, the sums of its first two parts, and the weighted sum of each sequence [b]."""
        lm, kl, z = (part.view(shape).sum(-1) for part in self)
        kl = kl * terms.temperature**2
        by_sequence = lm * (1.0 - terms.weight) + kl * terms.weight + z * terms.z_loss
        return by_sequence.sum(), lm.sum(), kl.sum(), by_sequence


def _combined(found: tuple[Tensor, Tensor, Tensor, Tensor], labels: Tensor, terms: _Terms) -> CombinedLoss:
    total, lm, kl, by_sequence = found
    count = (labels != IGNORED).sum().to(total.dtype)
    parts = None if terms.weight == 1.0 else lm, None if terms.weight == 0.0 else kl
    return CombinedLoss(total, count, *parts, by_sequence)


def _weighted(teacher: AnyTeacher, weight: float) -> AnyTeacher | None:
    """The teacher, if the divergence from it has a weight."""
    if weight == 0.0:
        return None
    if teacher is None:
        raise OptionError(f"a divergence with weight {weight} needs the logits of a teacher")
    return teacher


def _exact(logits: Tensor) -> torch.dtype:
    """The dtype of sums and softmaxes."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _evaluate(
    flat: Tensor, labels: Tensor, teacher: Tensor | Compressed | None, terms: _Terms, gradient: Tensor | None
) -> _Found:
    """The parts of the loss of rows of logits, and its gradient.

    Args:
        flat: [n, V], logits.
        labels: [n].
        teacher: its logits [n, V'], or compressed; None if the divergence has no weight.
        terms: of the loss.
        gradient: [n, V], overwritten with the gradient; may be `flat`; None if none is needed.
    """
    vocabulary, (weight, temperature, top_k, z_loss) = flat.shape[-1], terms
    labels = labels.reshape(-1, 1)
    ignored = labels == IGNORED
    labels = labels.masked_fill(ignored, 0)
    exact = _exact(flat)
    lm, kl, z = (torch.zeros(len(flat), 1, dtype=exact, device=flat.device) for _ in range(3))
    whole = _Teacher(teacher, vocabulary, temperature, top_k) if teacher is not None else None
    rows = _rows(flat)
    for start in range(0, len(flat), rows):
        part = slice(start, start + rows)
        log_p, slope = None, None
        if weight < 1.0 or z_loss:
            log_p = flat[part].log_softmax(-1, dtype=exact)
            torch.neg(log_p.gather(1, labels[part]), out=lm[part])
            if z_loss:
                z[part] = flat[part].gather(1, labels[part]).to(exact) + lm[part]  # log(Z)
        if whole is not None:
            same = log_p is not None and temperature == 1.0 and whole.shared == vocabulary
            log_q = log_p if same else _log_softmax(flat[part, : whole.shared], temperature)
            kl[part], slope = whole.divergence(log_q, part)
            slope.mul_(weight * temperature)
        if gradient is None:
            continue
        if log_p is not None:
            step = log_p.exp_()
            if z_loss:
                step.mul_(2.0 * z_loss * z[part] + (1.0 - weight))
            elif slope is not None:
                step.mul_(1.0 - weight)
            step.scatter_add_(1, labels[part], torch.full_like(lm[part], weight - 1.0))
            if slope is not None:
                step[:, : slope.shape[1]] += slope
            slope = step
        assert slope is not None
        slope.masked_fill_(ignored[part], 0.0)
        gradient[part, : slope.shape[1]] = slope
        gradient[part, slope.shape[1] :] = 0.0
    return _Found(*(part.masked_fill_(ignored, 0.0) for part in (lm, kl, z.square_())))


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        teacher: Tensor | Compressed | None,
        terms: _Terms,
        differentiable: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        flat = logits.detach().reshape(-1, logits.shape[-1])
        gradient = (flat if overwrite else torch.empty_like(flat)) if differentiable else None
        found = _evaluate(flat, labels, teacher, terms, gradient).totals(labels.shape, terms)
        if gradient is not None:
            ctx.save_for_backward(gradient.view(logits.shape))
        ctx.overwrite = overwrite
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scaled = gradient if ctx.overwrite else torch.empty_like(gradient)
        source, target = (tensor.view(-1, gradient.shape[-1]) for tensor in (gradient, scaled))
        rows = _rows(source)
        for old, new in zip(source.split(rows), target.split(rows), strict=True):
            _scale(old, scale, new)
        return scaled, *[None] * 5


class _LinearLoss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        cap: float | None,
        labels: Tensor,
        teacher: Tensor | None,
        teacher_layer: OutputLayer | None,
        terms: _Terms,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.dtype
        flat, labels_flat = states.detach().reshape(-1, states.shape[-1]), labels.reshape(-1)
        theirs = None if teacher is None else teacher.detach().reshape(-1, teacher.shape[-1])
        needed = [differentiable and each for each in ctx.needs_input_grad[:3]]
        layer = OutputLayer(*(None if each is None else each.detach().to(dtype) for each in (weights, bias)))
        of_states = torch.empty_like(flat) if needed[0] else None
        of_weights, of_bias = (
            torch.zeros_like(each) if asked else None for each, asked in zip((weights, bias), needed[1:], strict=True)
        )
        found = []
        with torch.autocast(kind, enabled=False):
            step = positions_at_once(len(flat))
            for start in range(0, len(flat), step):
                part = slice(start, start + step)
                some = flat[part].to(dtype)
                logits = layer.logits(some)
                slope = None
                if cap is not None:
                    logits = capped(logits, cap)
                    slope = 1.0 - (logits / cap).square_() if any(needed) else None
                other = None if theirs is None else theirs[part]
                if other is not None and teacher_layer is not None:
                    other = teacher_layer.logits(other)
                found.append(_evaluate(logits, labels_flat[part], other, terms, logits if any(needed) else None))
                gradient = logits if slope is None else logits.mul_(slope)
                if of_states is not None:
                    of_states[part] = gradient @ layer.weight
                if of_weights is not None:
                    if of_weights.dtype == dtype:
                        of_weights.addmm_(gradient.T, some)
                    else:
                        of_weights += gradient.T @ some
                if of_bias is not None:
                    of_bias += gradient.sum(0, dtype=of_bias.dtype)
        ctx.save_for_backward(None if of_states is None else of_states.view(states.shape), of_weights, of_bias)
        parts = _Found(*(torch.cat(each) for each in zip(*found, strict=True)))
        totals = parts.totals(labels.shape, terms)
        ctx.mark_non_differentiable(*totals[1:])
        return totals

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if each is None else _scale(each, scale, each) for each in ctx.saved_tensors)
        return *scaled, *[None] * 6


def _scale(gradient: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write a gradient times a scale, which in the gradient's own dtype would be rounded, with the same error for all numbers."""
    return out.copy_(gradient.to(scale.dtype) * scale)


class _Teacher:
    """The teacher's distributions, with which the student's are compared row by row."""

    def __init__(self, teacher: Tensor | Compressed, vocabulary: int, temperature: float, top_k: int | None) -> None:
        self.temperature, self.top_k = temperature, top_k
        self.logits: Tensor | None = None
        if isinstance(teacher, Compressed):
            self.shared = teacher.vocabulary
            self.top = (teacher.values.flatten(0, -2), teacher.indices.flatten(0, -2), teacher.rest.reshape(-1, 1))
        else:
            self.shared = min(vocabulary, teacher.shape[-1])
            self.logits = teacher.detach().reshape(-1, teacher.shape[-1])

    def divergence(self, log_q: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """KL [rows, 1], and its gradient [rows, V] with respect to the student's logits divided by the temperature.

        Args:
            log_q: [rows, V], the student's log-probabilities.
            part: the rows to compare.
        """
        q = log_q.exp()
        if self.logits is None:
            return _lumped_divergence(log_q, q, *(tensor[part] for tensor in self.top))
        log_p = _log_softmax(self.logits[part, : self.shared], self.temperature)
        if self.top_k is not None and self.top_k < self.shared:
            return _lumped_divergence(log_q, q, *_lump(log_p, self.top_k))
        p = log_p.exp()
        least = torch.finfo(log_p.dtype).min / 2  # tokens with probability 0 contribute 0 * (log 0 - log 0) = 0
        terms = log_p.clamp_(min=least).sub_(log_q.clamp(min=least)).mul_(p)
        return terms.sum(-1, keepdim=True), q.sub_(p)


def _lump(log_p: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest [rows, k] of the log-probabilities [rows, V], their indices, and the total probability [rows, 1] of
    the rest.
    """
    values, indices = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1)
    return values, indices, log_p.exp().scatter_(1, indices, 0.0).sum(-1, keepdim=True)


def _lumped_divergence(
    log_q: Tensor, q: Tensor, values: Tensor, indices: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor]:
    """KL [rows, 1] over k + 1 outcomes, and its gradient as in `_Teacher.divergence`, which overwrites q [rows, V]."""
    least = torch.finfo(log_q.dtype).min / 2
    values, rest = values.to(log_q.dtype), rest.to(log_q.dtype)
    p, head = values.exp(), q.gather(1, indices)
    kl = (p * (values.clamp(min=least) - log_q.gather(1, indices).clamp(min=least))).sum(-1, keepdim=True)
    tail = q.scatter_(1, indices, 0.0)
    mass = tail.sum(-1, keepdim=True)
    kl += rest * (rest.log().clamp(min=least) - mass.log().clamp(min=least))
    slope = tail.mul_(1.0 - rest / mass.clamp(min=torch.finfo(mass.dtype).tiny))
    return kl, slope.scatter_(1, indices, head - p)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at a temperature, in newly allocated float32 or float64 memory."""
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if temperature == 1.0:
        return logits.log_softmax(-1, dtype=exact)
    return (logits.to(exact) / temperature).log_softmax(-1)


def _rows(logits: Tensor) -> int:
    """The number of rows of logits [n, V] in a chunk."""
    size = _CHUNK * torch.get_num_threads() if logits.is_cpu else _CHUNK_ON_ACCELERATOR
    return max(1, size // int(logits.shape[-1]))


def _check_options(weight: float, temperature: float, top_k: int | None) -> None:
    if not 0.0 <= weight <= 1.0:
        raise OptionError(
            f"the weight of the divergence is {weight}, expected 0 to 1 (the rest of 1 weights the language-model loss)"
        )
    if not 0.0 < temperature < float("inf"):
        raise OptionError(f"temperature is {temperature}, expected a number above 0")
    if top_k is not None and top_k < 1:
        raise OptionError(f"top_k is {top_k}, expected at least 1")


def _check_shapes(logits: Tensor, labels: Tensor, teacher: Tensor | Compressed | None, temperature: float) -> None:
    shapes = [logits.shape[:-1], labels.shape]
    if isinstance(teacher, Compressed):
        shapes.append(teacher.rest.shape)
        if teacher.temperature != temperature:
            raise OptionError(
                f"the teacher was compressed at temperature {teacher.temperature}, and the loss is taken at {temperature}"
            )
        if teacher.vocabulary > logits.shape[-1]:
            raise OptionError(
                f"the teacher was compressed over {teacher.vocabulary} tokens, the student has {logits.shape[-1]}"
            )
    elif teacher is not None:
        shapes.append(teacher.shape[:-1])
    if any(shape != shapes[0] for shape in shapes):
        raise OptionError(
            f"logits, labels and teacher are for {', '.join(str(list(shape)) for shape in shapes)} positions: they must be equal"
        )
