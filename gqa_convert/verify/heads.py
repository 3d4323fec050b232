"""Other heads for the loaded SOURCE: OUT's, each repeated for its group, the means of groups, or its own in another order.

What is made are the parameters of attention modules by name, which `replaced` puts into a model for a while.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gqa_convert.families.family import Family
from gqa_convert.verify.geometry import MERGED, Geometry, Heads, HeadTensor, Kind, Module, Tensors


def attention_parameters(model: Any, family: Family) -> Tensors:
    """The parameters of a loaded model's attention modules."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if any(f".{module}." in f".{name}" for module in family.attention)
    }


def repeated_heads(geometry: Geometry, model: Any, out: Tensors, *, folds: bool) -> Tensors:
    """SOURCE's parameters with OUT's heads, each K/V head repeated for its group.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        out: the loaded OUT's attention parameters.
        folds: whether queries and outputs are OUT's too.
    """

    def repeat(_: Module, tensor: HeadTensor, theirs: Heads) -> Heads:
        roles = [role for role in theirs if folds or role in MERGED]
        ours = tensor.read(out, converted=True) if roles else {}
        return {role: ours[role].repeat_interleave(len(theirs[role]) // len(ours[role]), 0) for role in roles}

    return _changed_heads(geometry, model, repeat)


def pooled_heads(geometry: Geometry, model: Any) -> Tensors:
    """SOURCE's parameters with the mean of each group in place of its K/V heads."""

    def pool(module: Module, _: HeadTensor, theirs: Heads) -> Heads:
        groups = {role: heads.unflatten(0, (module.after, -1)) for role, heads in theirs.items() if role in MERGED}
        return {role: heads.mean(1, keepdim=True).expand_as(heads).flatten(0, 1) for role, heads in groups.items()}

    return _changed_heads(geometry, model, pool)


def reordered_heads(geometry: Geometry, model: Any, orders: Mapping[tuple[Kind, int], list[int]]) -> Tensors:
    """SOURCE's parameters with its own K/V heads, and the query heads that read them, in other orders.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        orders: by the kind of attention and the number of the layer, since names may differ in memory.
    """

    def reorder(module: Module, _: HeadTensor, theirs: Heads) -> Heads:
        theirs.pop("output_bias", None)  # it belongs to no head
        order = orders.get((module.kind, module.number), list(range(module.before)))
        return {role: heads.unflatten(0, (len(order), -1))[order].flatten(0, 1) for role, heads in theirs.items()}

    return _changed_heads(geometry, model, reorder)


def _changed_heads(geometry: Geometry, model: Any, change: Callable[[Module, HeadTensor, Heads], Heads]) -> Tensors:
    """SOURCE's parameters with what `change` makes of the heads of each tensor of a module whose heads are merged."""
    parameters = dict(model.named_parameters())
    made: dict[str, Tensor] = {}
    for module in geometry.merged:
        for tensor in module.tensors:
            made |= tensor.replace(parameters, change(module, tensor, tensor.read(parameters, converted=False)))
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
    squares: dict[str, Tensor] = {}

    def compare(module: Any, args: Any, options: Any, output: Any) -> None:
        expected = _states(output)
        found = [expected.square().sum()]
        for parameters in others:
            with replaced(model, parameters):
                found.append((_states(module.forward(*args, **options)) - expected).square().sum())
        squares[names[module]] = squares.get(names[module], 0) + torch.stack(found)

    handles = [module.register_forward_hook(compare, with_kwargs=True) for module in names]
    try:
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
