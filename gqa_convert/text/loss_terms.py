"""What the losses of uptraining compute for rows of logits, with the gradient; see `losses`.

Logits are processed in chunks of a few rows, which fit a CPU's cache. Sums and softmaxes are float32 (float64 for
float64 logits). The gradient is computed in the forward pass, so that each chunk is read once and the teacher's logits
need not be kept for the backward pass.
"""

from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from gqa_convert.errors import OptionError
from gqa_convert.text.labels import IGNORED

CHUNK: Final = 1 << 18
"""The number of logits in a CPU thread's chunk: 1 MiB in float32."""
CHUNK_ON_ACCELERATOR: Final = 1 << 24

AnyTeacher = TypeVar("AnyTeacher")


class CombinedLoss(NamedTuple):
    """A weighted loss and its parts, each a sum over positions; a part with weight 0 is not computed."""

    sum: Tensor
    count: Tensor
    lm: Tensor | None
    """The cross-entropy part. Like `kl` it has no gradient and is only logged."""
    kl: Tensor | None
    by_sequence: Tensor
    """[b], the loss of each sequence, without gradient."""


class Terms(NamedTuple):
    """The terms of a combined loss; see `combined_loss`."""

    weight: float
    temperature: float
    top_k: int | None
    z_loss: float


class Found(NamedTuple):
    """The parts of the loss of rows, [rows, 1] each: the cross-entropy, the divergence divided by the square of the
    temperature, and the square of log(Z).
    """

    lm: Tensor
    kl: Tensor
    z: Tensor

    def totals(self, shape: torch.Size, terms: Terms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The weighted sum, the sums of its first two parts, and the weighted sum of each sequence [b]."""
        lm, kl, z = (part.view(shape).sum(-1) for part in self)
        kl = kl * terms.temperature**2
        by_sequence = lm * (1.0 - terms.weight) + kl * terms.weight + z * terms.z_loss
        return by_sequence.sum(), lm.sum(), kl.sum(), by_sequence


def combined(found: tuple[Tensor, Tensor, Tensor, Tensor], labels: Tensor, terms: Terms) -> CombinedLoss:
    total, lm, kl, by_sequence = found
    count = (labels != IGNORED).sum().to(total.dtype)
    parts = None if terms.weight == 1.0 else lm, None if terms.weight == 0.0 else kl
    return CombinedLoss(total, count, *parts, by_sequence)


def weighted(teacher: AnyTeacher, weight: float) -> AnyTeacher | None:
    """The teacher, if the divergence from it has a weight."""
    if weight == 0.0:
        return None
    if teacher is None:
        raise OptionError(f"a divergence with weight {weight} needs the logits of a teacher")
    return teacher


def check_options(weight: float, temperature: float, top_k: int | None) -> None:
    if not 0.0 <= weight <= 1.0:
        raise OptionError(
            f"the weight of the divergence is {weight}, expected 0 to 1 (the rest of 1 weights the language-model loss)"
        )
    if not 0.0 < temperature < float("inf"):
        raise OptionError(f"temperature is {temperature}, expected a number above 0")
    if top_k is not None and top_k < 1:
        raise OptionError(f"top_k is {top_k}, expected at least 1")


def check_shapes(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> None:
    shapes = [logits.shape[:-1], labels.shape]
    if teacher is not None:
        shapes.append(teacher.shape[:-1])
    if any(shape != shapes[0] for shape in shapes):
        raise OptionError(
            f"logits, labels and teacher are for {', '.join(str(list(shape)) for shape in shapes)} positions: they must be equal"
        )


def exact_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of sums and softmaxes."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def evaluate(flat: Tensor, labels: Tensor, teacher: Tensor | None, terms: Terms, gradient: Tensor | None) -> Found:
    """The parts of the loss of rows of logits, and its gradient.

    Args:
        flat: [n, V], logits.
        labels: [n].
        teacher: its logits [n, V']; None if the divergence has no weight.
        terms: of the loss.
        gradient: [n, V], overwritten with the gradient; may be `flat`; None if none is needed.
    """
    vocabulary, (weight, temperature, top_k, z_loss) = flat.shape[-1], terms
    labels = labels.reshape(-1, 1)
    ignored = labels == IGNORED
    labels = labels.masked_fill(ignored, 0)
    exact = exact_dtype(flat)
    lm, kl, z = (torch.zeros(len(flat), 1, dtype=exact, device=flat.device) for _ in range(3))
    whole = _Teacher(teacher, vocabulary, temperature, top_k) if teacher is not None else None
    rows = rows_at_once(flat)
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
            log_q = log_p if same else log_softmax(flat[part, : whole.shared], temperature)
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
    return Found(*(part.masked_fill_(ignored, 0.0) for part in (lm, kl, z.square_())))


def scale_into(gradient: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write a gradient times a scale. In the gradient's own dtype the scale would be rounded, with the same error for all
    numbers.
    """
    return out.copy_(gradient.to(scale.dtype) * scale)


class _Teacher:
    """The teacher's distributions, with which the student's are compared row by row."""

    def __init__(self, teacher: Tensor, vocabulary: int, temperature: float, top_k: int | None) -> None:
        self.temperature, self.top_k = temperature, top_k
        self.shared = min(vocabulary, teacher.shape[-1])
        self.logits = teacher.detach().reshape(-1, teacher.shape[-1])

    def divergence(self, log_q: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """KL [rows, 1], and its gradient [rows, V] with respect to the student's logits divided by the temperature.

        Args:
            log_q: [rows, V], the student's log-probabilities.
            part: the rows to compare.
        """
        q = log_q.exp()
        log_p = log_softmax(self.logits[part, : self.shared], self.temperature)
        if self.top_k is not None and self.top_k < self.shared:
            return _lumped_divergence(log_q, q, *lump(log_p, self.top_k))
        p = log_p.exp()
        least = torch.finfo(log_p.dtype).min / 2  # tokens with probability 0 contribute 0 * (log 0 - log 0) = 0
        terms = log_p.clamp_(min=least).sub_(log_q.clamp(min=least)).mul_(p)
        return terms.sum(-1, keepdim=True), q.sub_(p)


def lump(log_p: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest [rows, k] of the log-probabilities [rows, V], their indices, and the total probability [rows, 1] of
    the rest.

    The divergence of the lumped distributions never exceeds the full one, grows with k up to it, and is zero with zero
    gradient if student and teacher are equal. Renormalising over the k tokens would not have these properties: compared
    with the student's full distribution, the minimum is at a student without a tail; compared with the student's
    renormalised distribution, the student's tail could grow unpenalised.
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


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at a temperature, in newly allocated float32 or float64 memory."""
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if temperature == 1.0:
        return logits.log_softmax(-1, dtype=exact)
    return (logits.to(exact) / temperature).log_softmax(-1)


def rows_at_once(logits: Tensor) -> int:
    """The number of rows of logits [n, V] in a chunk."""
    size = CHUNK * torch.get_num_threads() if logits.is_cpu else CHUNK_ON_ACCELERATOR
    return max(1, size // int(logits.shape[-1]))
