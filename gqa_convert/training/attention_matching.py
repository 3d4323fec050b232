"""Distillation of attention outputs: the student's attention modules are trained to match the teacher's contributions.

Shape legend: b batch, L positions, d hidden_size.
"""

from collections.abc import Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gqa_convert.errors import OptionError
from gqa_convert.families.target_architectures import family_of_result
from gqa_convert.text.labels import IGNORED

_LEAST: Final = 1e-12


class AttentionTap:
    """Records the contributions of the decoder's self- and cross-attention, after the output projection, in order.

        with AttentionTap(model) as tap:
            logits = model(...).logits
        tap.outputs  # [b, L, d] each

    The hooks exist only inside the `with` block. Leave it before the backward pass, in which gradient checkpointing
    runs layers a second time, so that they are not recorded twice.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the projections.

        Raises:
            UnsupportedFamilyError: the model type is unknown.
            OptionError: no projection was found.
        """
        self.outputs: list[Tensor] = []
        self._model = model
        self._projections = attention_projections(model)
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self.outputs = []
        self._handles = [projection.register_forward_hook(self._record) for projection in self._projections]
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        learns = (
            torch.is_grad_enabled()
            and self._model.training
            and any(each.requires_grad for each in self._model.parameters())
        )
        if error is None and learns and self.outputs and not any(output.requires_grad for output in self.outputs):
            raise OptionError(
                "attention outputs have no gradient: enable gradient checkpointing with use_reentrant=False to match them"
            )

    def _record(self, module: nn.Module, inputs: object, output: Tensor) -> None:  # noqa: ARG002
        self.outputs.append(output)


def attention_projections(model: nn.Module) -> list[nn.Module]:
    """The output projections of a transformers model's attention, except those of an encoder.

    Raises:
        UnsupportedFamilyError: the model type is unknown.
        OptionError: no projection was found.
    """
    family = family_of_result(model.config.model_type)
    found = []
    for name, module in model.named_modules():
        if family.encoder in name.split(".") or not f".{name}".endswith(
            tuple(f".{attention}" for attention in family.attention)
        ):
            continue
        if hasattr(module, family.fused or family.key):  # hybrid models have other layers of the same name
            found.append(module.get_submodule(family.output))
    if not found:
        raise OptionError(
            f"no attention was found in a model of type {family.model_type}: its outputs cannot be matched"
        )
    return found


def attention_match(student: Sequence[Tensor], teacher: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """The squared error of attention outputs relative to the teacher's squared norm, averaged over layers.

    The ratio is taken over all positions of a sequence together, so that positions with negligible attention outputs
    are not overweighted and the loss of a sequence does not depend on its batch. It is then weighted by the number of
    positions.

    Args:
        student: [b, L, d] per layer, as recorded by `AttentionTap`.
        teacher: the teacher's outputs; receive no gradient.
        labels: [b, L]; positions with -100 are ignored.

    Returns:
        The sum over the labelled positions and their number, both float32.

    Raises:
        OptionError: layers or shapes differ.
    """
    if len(student) != len(teacher) or not student:
        raise OptionError(
            f"the student has {len(student)} attention outputs and the teacher {len(teacher)}: they must be equal"
        )
    seen = labels != IGNORED
    counts = seen.sum(1)
    total = torch.zeros(
        (), dtype=torch.float64 if student[0].dtype == torch.float64 else torch.float32, device=labels.device
    )
    for number, (output, target) in enumerate(zip(student, teacher, strict=True)):
        if output.shape != target.shape or output.shape[:2] != labels.shape:
            raise OptionError(
                f"attention output {number} is {list(output.shape)} in the student and {list(target.shape)} in the teacher, "
                f"for labels {list(labels.shape)}: the shapes must be equal"
            )
        total = total + (_RelativeError.apply(output, target, seen) * counts).sum().to(total.device)
    return total / len(student), counts.sum().to(total.dtype)


class _RelativeError(torch.autograd.Function):  # type: ignore[misc]
    """|student - teacher|^2 / |teacher|^2 of each sequence [b]; the difference is saved for the backward pass in the
    student's dtype.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, seen: Tensor) -> Tensor:
        exact = torch.float64 if student.dtype == torch.float64 else torch.float32
        held_out = ~seen[:, :, None]
        target = teacher.to(exact).masked_fill(held_out, 0.0)
        norm = target.square().sum((1, 2)).clamp_(min=_LEAST)
        difference = student.to(exact).masked_fill(held_out, 0.0).sub_(target)
        ctx.save_for_backward(difference.to(student.dtype), norm)
        return difference.square().sum((1, 2)) / norm

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        difference, norm = ctx.saved_tensors
        gradient = difference.to(norm.dtype) * (2.0 * scale / norm)[:, None, None]
        return gradient.to(difference.dtype), None, None
