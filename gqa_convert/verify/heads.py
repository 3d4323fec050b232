"""Other heads for the loaded SOURCE: OUT's, each repeated for its group, or the means of groups.

What is made are the parameters of attention modules by name, which `replaced` puts into a model for a while.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gqa_convert.families.family import Family
from gqa_convert.verify.geometry import MERGED, Geometry, Heads, Tensors


def attention_parameters(model: Any, family: Family) -> Tensors:
    """The parameters of a loaded model's attention modules."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if any(f".{module}." in f".{name}" for module in family.attention)
    }


def repeated_heads(geometry: Geometry, source: Tensors, out: Tensors | None, *, folds: bool) -> Tensors:
    """SOURCE's parameters with other heads, each K/V head repeated for its group.

    Args:
        geometry: of the loaded models.
        source: the loaded SOURCE's attention parameters.
        out: those of the loaded OUT, whose heads they are; None for the mean of each group of SOURCE's K/V heads.
        folds: whether queries and outputs are OUT's too.
    """
    made: Tensors = {}
    for module in geometry.merged:
        for before, after in module.tensors:
            heads = before.read(source) if out is None else after.read(out)
            for role in list(heads):
                if role in MERGED:
                    means = heads[role].unflatten(0, (module.after, -1)).mean(1)  # of OUT, each of one head
                    heads[role] = means.repeat_interleave(module.before // module.after, 0)
                elif not folds:
                    del heads[role]
            if heads:
                made |= before.replace(source, heads)
    return made


@contextmanager
def replaced(model: Any, parameters: Tensors) -> Iterator[None]:
    """Put other numbers into a model's parameters for a while."""
    own = dict(model.named_parameters())
    kept = {name: own[name].data for name in parameters}
    try:
        for name, tensor in parameters.items():
            own[name].data = tensor
        yield
    finally:
        for name, tensor in kept.items():
            own[name].data = tensor


def compare_modules(
    geometry: Geometry, model: Any, run: Callable[[], object], ours: Tensors, pooled: Tensors
) -> dict[str, tuple[float, float]]:
    """How far the outputs of attention modules are from SOURCE's on SOURCE's own inputs, relative to its outputs.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        run: runs it.
        ours: its parameters with OUT's heads.
        pooled: those with means of heads.

    Returns:
        By module, the error of OUT and that of mean pooling. A module that runs several times has its largest ones.
    """
    names = {model.get_submodule(module.name): module.name for module in geometry.merged}
    errors: dict[str, tuple[float, float]] = {}

    def compare(module: Any, args: Any, options: Any, output: Any) -> None:
        expected = _states(output)
        found = []
        for parameters in (ours, pooled):
            with replaced(model, parameters):
                lost = _states(module.forward(*args, **options)) - expected
            found.append(float((lost.norm() / expected.norm().clamp(min=1e-30)).nan_to_num(torch.inf)))
        errors[names[module]] = max(errors.get(names[module], (0.0, 0.0)), (found[0], found[1]))

    handles = [module.register_forward_hook(compare, with_kwargs=True) for module in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return errors


def _states(output: Any) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).double()
