"""Losses of uptraining as (sum, count) pairs, which add up over micro-batches and processes before one is divided by
the other.

Shape legend: b batch, L positions, V vocabulary, n = b * L, k outcomes of a compressed distribution, d hidden size.

Logits are the largest tensors of a step. They are walked in chunks of a few rows, which stay in the cache of a CPU;
sums and softmaxes are float32 (float64 for float64 logits), and the gradient is made on the way forward, so that each
chunk is read once and the teacher's logits need not be kept for the way back.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gqa_convert.errors import OptionError
from gqa_convert.text.labels import IGNORED

_CHUNK: Final = 1 << 18
"""Logits that a thread of a CPU works on at a time: 1 MiB in float32."""
_CHUNK_ON_ACCELERATOR: Final = 1 << 24
_LEAST: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Compressed:
    """Next-token distributions as their k likeliest tokens and the probability of all others together."""

    values: Tensor
    """[b, L, k], log-probabilities."""
    indices: Tensor
    """[b, L, k], their tokens."""
    rest: Tensor
    """[b, L], the probability of the other tokens."""
    temperature: float
    vocabulary: int
    """Tokens over which the probabilities were taken."""


class CombinedLoss(NamedTuple):
    """A weighted loss and its parts, each a sum over positions; a part with weight 0 is not computed."""

    sum: Tensor
    count: Tensor
    lm: Tensor | None
    """Without gradient, as `kl`: both are for the log."""
    kl: Tensor | None


def lm_loss(logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats.

    Args:
        logits: [b, L, V].
        labels: [b, L], the token to be predicted at each position (already shifted), or -100.
        overwrite: see `combined_loss`.

    Returns:
        Sum and number of the positions with a label, both float32.
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
        teacher: the same, or what `compress` made of them; gets no gradient.
        labels: [b, L]; positions with -100 are left out.
        temperature: T, which divides both logits.
        top_k: compare these many of the teacher's likeliest tokens, and all others as one; see `compress`.
        overwrite: see `combined_loss`.

    Returns:
        Sum and number of the positions with a label, both float32.
    """
    loss = combined_loss(
        student, labels, teacher, weight=1.0, temperature=temperature, top_k=top_k, overwrite=overwrite
    )
    return loss.sum, loss.count


def compress(teacher: Tensor, top_k: int, temperature: float = 1.0, vocabulary: int | None = None) -> Compressed:
    """The teacher's distributions in little memory, so that its logits can be freed.

    The tokens outside the k likeliest are one outcome, whose probability is kept. The divergence is then that of a
    coarser question: never above the full one, growing with k up to it, and zero with zero gradient where student and
    teacher are equal. Renormalising the k instead would not do: against the student's full distribution its least value
    is at a student without a tail, and against the student's renormalised one the tail may grow unpunished.

    Args:
        teacher: [b, L, V], logits.
        top_k: k; V at most is used.
        temperature: of the loss to come.
        vocabulary: of the student: where the two are padded to different sizes, the part they share is compared.
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
    overwrite: bool = False,
) -> CombinedLoss:
    """(1 - weight) * `lm_loss` + weight * `kl_loss`, in one pass over the logits.

    Vocabularies padded to different sizes are compared in the part that they share, both distributions being those
    given that the token is in it.

    Args:
        logits: [b, L, V], the student's.
        labels: [b, L], next tokens, or -100 for positions that do not count.
        teacher: the teacher's logits [b, L, V], or compressed.
        weight: of the divergence, from 0 (which leaves it out) to 1 (which leaves the cross-entropy out).
        temperature: of the divergence.
        top_k: as in `kl_loss`, for uncompressed teachers.
        overwrite: let the gradient take the place of the logits, which are then lost, as soon as this function returns,
            and allow a single backward pass: the loss then needs no memory of the logits' size.

    Returns:
        Sums over the positions with a label, and their number, in float32.

    Raises:
        OptionError: an option makes no sense, or the shapes do not fit together.
    """
    _check_options(weight, temperature, top_k)
    if weight == 0.0:
        teacher = None
    elif teacher is None:
        raise OptionError(f"a divergence with weight {weight} needs the logits of a teacher")
    _check_shapes(logits, labels, teacher, temperature)
    differentiable = torch.is_grad_enabled() and logits.requires_grad
    total, lm, kl = _Loss.apply(logits, labels, teacher, weight, temperature, top_k, differentiable, overwrite)
    count = (labels != IGNORED).sum().to(total.dtype)
    return CombinedLoss(total, count, None if weight == 1.0 else lm, None if teacher is None else kl)


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        teacher: Tensor | Compressed | None,
        weight: float,
        temperature: float,
        top_k: int | None,
        differentiable: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        vocabulary = logits.shape[-1]
        flat = logits.detach().reshape(-1, vocabulary)
        labels = labels.reshape(-1, 1)
        ignored = labels == IGNORED
        labels = labels.masked_fill(ignored, 0)
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        lm, kl = (torch.zeros(len(flat), 1, dtype=exact, device=flat.device) for _ in range(2))
        gradient = (flat if overwrite else torch.empty_like(flat)) if differentiable else None
        whole = _Teacher(teacher, vocabulary, temperature, top_k) if teacher is not None else None
        rows = _rows(flat)
        for start in range(0, len(flat), rows):
            part = slice(start, start + rows)
            log_p, slope = None, None
            if weight < 1.0:
                log_p = flat[part].log_softmax(-1, dtype=exact)
                torch.neg(log_p.gather(1, labels[part]), out=lm[part])
            if whole is not None:
                same = log_p is not None and temperature == 1.0 and whole.shared == vocabulary
                log_q = log_p if same else _log_softmax(flat[part, : whole.shared], temperature)
                kl[part], slope = whole.divergence(log_q, part)
                slope.mul_(weight * temperature)
            if gradient is None:
                continue
            if log_p is not None:
                step = log_p.exp_()
                step.scatter_add_(1, labels[part], torch.full_like(lm[part], -1.0))
                if slope is not None:
                    step.mul_(1.0 - weight)[:, : slope.shape[1]] += slope
                slope = step
            assert slope is not None
            slope.masked_fill_(ignored[part], 0.0)
            gradient[part, : slope.shape[1]] = slope
            gradient[part, slope.shape[1] :] = 0.0
        if gradient is not None:
            ctx.save_for_backward(gradient.view(logits.shape))
        ctx.overwrite = overwrite
        lm_sum, kl_sum = lm.masked_fill_(ignored, 0.0).sum(), kl.masked_fill_(ignored, 0.0).sum() * temperature**2
        ctx.mark_non_differentiable(lm_sum, kl_sum)
        return lm_sum * (1.0 - weight) + kl_sum * weight, lm_sum, kl_sum

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scaled = gradient if ctx.overwrite else torch.empty_like(gradient)
        source, target = (tensor.view(-1, gradient.shape[-1]) for tensor in (gradient, scaled))
        rows = _rows(source)
        for old, new in zip(source.split(rows), target.split(rows), strict=True):
            new.copy_(old.to(scale.dtype) * scale)  # a scale of the logits' type would be rounded alike for all of them
        return scaled, *[None] * 7


class _Teacher:
    """What the student's distributions are compared with, row by row."""

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
        """KL [rows, 1], and its gradient [rows, V] with regard to the student's logits over the temperature.

        Args:
            log_q: [rows, V], the student's log-probabilities.
            part: which rows.
        """
        q = log_q.exp()
        if self.logits is None:
            return _lumped_divergence(log_q, q, *(tensor[part] for tensor in self.top))
        log_p = _log_softmax(self.logits[part, : self.shared], self.temperature)
        if self.top_k is not None and self.top_k < self.shared:
            return _lumped_divergence(log_q, q, *_lump(log_p, self.top_k))
        p = log_p.exp()
        least = torch.finfo(log_p.dtype).min / 2  # tokens without probability: 0 * (log 0 - log 0) is 0
        terms = log_p.clamp_(min=least).sub_(log_q.clamp(min=least)).mul_(p)
        return terms.sum(-1, keepdim=True), q.sub_(p)


def _lump(log_p: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest [rows, k] of log-probabilities [rows, V], their places, and the probability [rows, 1] of the
    others.
    """
    values, indices = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1)
    return values, indices, log_p.exp().scatter_(1, indices, 0.0).sum(-1, keepdim=True)


def _lumped_divergence(
    log_q: Tensor, q: Tensor, values: Tensor, indices: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor]:
    """KL [rows, 1] over k + 1 outcomes, and its gradient as in `_Teacher.divergence`, which takes the place of q [rows,
    V].
    """
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
    """Log-probabilities at a temperature, float32 or float64, in memory of their own."""
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if temperature == 1.0:
        return logits.log_softmax(-1, dtype=exact)
    return (logits.to(exact) / temperature).log_softmax(-1)


def _rows(logits: Tensor) -> int:
    """Rows of logits [n, V] in a chunk."""
    size = _CHUNK * torch.get_num_threads() if logits.is_cpu else _CHUNK_ON_ACCELERATOR
    return max(1, size // int(logits.shape[-1]))


def _check_options(weight: float, temperature: float, top_k: int | None) -> None:
    if not 0.0 <= weight <= 1.0:
        raise OptionError(f"the divergence has weight {weight}: give 0 to 1, the rest is the language-model loss's")
    if not 0.0 < temperature < float("inf"):
        raise OptionError(f"temperature is {temperature}: it divides the logits, and is above 0")
    if top_k is not None and top_k < 1:
        raise OptionError(f"top_k is {top_k}: at least one token of the teacher's must be compared")


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
            f"logits, labels and teacher are for {', '.join(str(list(shape)) for shape in shapes)} positions: give the same"
        )
