"""What the losses of uptraining compute for rows of logits, with the gradient; see `losses`.

Logits are processed in chunks of a few rows, which fit a CPU's cache. Sums and softmaxes are float32 (float64 for
float64 logits). The gradient is computed in the forward pass, so that each chunk is read once and the teacher's logits
need not be kept for the backward pass.
"""

from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from gqa_convert.data.labels import IGNORED
from gqa_convert.errors import OptionError

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


class Terms(NamedTuple):
    """The terms of a combined loss; see `combined_loss`."""

    weight: float
    z_loss: float


class Found(NamedTuple):
    """The parts of the loss of rows, [rows, 1] each: the cross-entropy, the divergence, and the square of log(Z)."""

    lm: Tensor
    kl: Tensor
    z: Tensor

    def totals(self, shape: torch.Size, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
        """The weighted sum, and the sums of its first two parts. Sequences are summed first."""
        lm, kl, z = (part.view(shape).sum(-1) for part in self)
        weighted_sum = lm * (1.0 - terms.weight) + kl * terms.weight + z * terms.z_loss
        return weighted_sum.sum(), lm.sum(), kl.sum()


def combined(found: tuple[Tensor, Tensor, Tensor], labels: Tensor, terms: Terms) -> CombinedLoss:
    total, lm, kl = found
    count = (labels != IGNORED).sum().to(total.dtype)
    return CombinedLoss(total, count, None if terms.weight == 1.0 else lm, None if terms.weight == 0.0 else kl)


def weighted(teacher: AnyTeacher, weight: float) -> AnyTeacher | None:
    """The teacher, if the divergence from it has a weight."""
    if weight == 0.0:
        return None
    if teacher is None:
        raise OptionError(f"a divergence with weight {weight} needs the logits of a teacher")
    return teacher


def check_weight(weight: float) -> None:
    if not 0.0 <= weight <= 1.0:
        raise OptionError(
            f"the weight of the divergence is {weight}, expected 0 to 1 (the rest of 1 weights the language-model loss)"
        )


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
    vocabulary, (weight, z_loss) = flat.shape[-1], terms
    labels = labels.reshape(-1, 1)
    ignored = labels == IGNORED
    labels = labels.masked_fill(ignored, 0)
    exact = exact_dtype(flat)
    lm, kl, z = (torch.zeros(len(flat), 1, dtype=exact, device=flat.device) for _ in range(3))
    shared = 0 if teacher is None else min(vocabulary, teacher.shape[-1])
    rows = rows_at_once(flat)
    for start in range(0, len(flat), rows):
        part = slice(start, start + rows)
        log_p, slope = None, None
        if weight < 1.0 or z_loss:
            log_p = flat[part].log_softmax(-1, dtype=exact)
            torch.neg(log_p.gather(1, labels[part]), out=lm[part])
            if z_loss:
                z[part] = flat[part].gather(1, labels[part]).to(exact) + lm[part]  # log(Z)
        if teacher is not None:
            log_q = log_p
            if log_q is None or shared < vocabulary:
                log_q = flat[part, :shared].log_softmax(-1, dtype=exact)
            kl[part], slope = _divergence(log_q, teacher[part, :shared])
            slope.mul_(weight)
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


def _divergence(log_q: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL [rows, 1] of the student from the teacher, and its gradient [rows, V] with respect to the student's logits.

    Args:
        log_q: [rows, V], the student's log-probabilities.
        teacher: [rows, V], the teacher's logits.
    """
    log_p = teacher.log_softmax(-1, dtype=exact_dtype(teacher))
    p, q = log_p.exp(), log_q.exp()
    least = torch.finfo(log_p.dtype).min / 2  # tokens with probability 0 contribute 0 * (log 0 - log 0) = 0
    terms = log_p.clamp_(min=least).sub_(log_q.clamp(min=least)).mul_(p)
    return terms.sum(-1, keepdim=True), q.sub_(p)


def rows_at_once(logits: Tensor) -> int:
    """The number of rows of logits [n, V] in a chunk."""
    size = CHUNK * torch.get_num_threads() if logits.is_cpu else CHUNK_ON_ACCELERATOR
    return max(1, size // int(logits.shape[-1]))
