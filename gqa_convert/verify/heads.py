"""Other heads for the loaded SOURCE: OUT's, each repeated for its group, the means of groups, or its own in another order.

What is made are the parameters of attention modules by name, which `replaced` puts into a model for a while.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gqa_convert.families.family import Family
from gqa_convert.verify.geometry import MERGED, Geometry, Kind, Tensors


def attention_parameters(model: Any, family: Family, *, folds: bool) -> dict[str, Tensor]:
    """The parameters of a loaded model that may hold heads which a conversion changes.

    Args:
        model: of SOURCE or OUT.
        family: SOURCE's family.
        folds: whether the method changes queries and outputs too.
    """
    parts = [family.fused or family.key, family.value, family.key_norm_name]
    parts += [family.query, family.output] if folds else []
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if any(f".{part}." in name for part in parts)
    }


def repeated_heads(geometry: Geometry, model: Any, out: Tensors, *, folds: bool) -> dict[str, Tensor]:
    """SOURCE's parameters with OUT's heads, each K/V head repeated for its group.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        out: the loaded OUT's attention parameters.
        folds: whether queries and outputs are OUT's too.
    """
    parameters = dict(model.named_parameters())
    made: dict[str, Tensor] = {}
    for _, tensor in geometry.merged_tensors:
        roles = [role for role in tensor.before if folds or role in MERGED]
        ours = tensor.read(out, converted=True) if roles else {}
        times = {role: len(tensor.before[role]) // len(ours[role]) for role in roles}
        made |= tensor.replace(parameters, {role: ours[role].repeat_interleave(times[role], 0) for role in roles})
    return made


def pooled_heads(geometry: Geometry, model: Any) -> dict[str, Tensor]:
    """SOURCE's parameters with the mean of each group in place of its K/V heads."""
    parameters = dict(model.named_parameters())
    made: dict[str, Tensor] = {}
    for module, tensor in geometry.merged_tensors:
        size = module.before // module.after
        heads = tensor.read(parameters, converted=False)
        means = {role: heads[role].unflatten(0, (-1, size)).mean(1) for role in MERGED if role in heads}
        made |= tensor.replace(parameters, {role: each.repeat_interleave(size, 0) for role, each in means.items()})
    return made


def reordered_heads(geometry: Geometry, model: Any, orders: Mapping[tuple[Kind, int], list[int]]) -> dict[str, Tensor]:
    """SOURCE's parameters with its own K/V heads, and the query heads that read them, in other orders.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        orders: by the kind of attention and the number of the layer, since names may differ in memory.
    """
    parameters = dict(model.named_parameters())
    made: dict[str, Tensor] = {}
    for module, tensor in geometry.merged_tensors:
        order = orders.get((module.kind, module.number), list(range(module.before)))
        heads = tensor.read(parameters, converted=False)
        heads.pop("output_bias", None)  # it belongs to no head
        moved = {role: each.unflatten(0, (len(order), -1))[order].flatten(0, 1) for role, each in heads.items()}
        made |= tensor.replace(parameters, moved)
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
    geometry: Geometry, model: Any, run: Callable[[], object], *others: Tensors
) -> dict[str, list[float]]:
    """How far the outputs of attention modules are from SOURCE's on SOURCE's own inputs, relative to its outputs.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        run: runs it.
        others: the parameters to compare.

    Returns:
        By module, the error with each of the others.
    """
    names = {model.get_submodule(module.name): module.name for module in geometry.merged}
    squares = {name: torch.zeros(1 + len(others), dtype=torch.float64) for name in names.values()}

    def compare(module: Any, args: Any, options: Any, output: Any) -> None:
        expected = _states(output)
        found = [torch.zeros_like(expected)]
        for parameters in others:
            with replaced(model, parameters):
                found.append(_states(module.forward(*args, **options)))
        squares[names[module]] += torch.stack([(each - expected).square().sum() for each in found])

    handles = [module.register_forward_hook(compare, with_kwargs=True) for module in names]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: (each[1:] / each[0].clamp(min=1e-30)).sqrt().nan_to_num(torch.inf).tolist()
        for name, each in squares.items()
    }


def _states(output: Any) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).double()
