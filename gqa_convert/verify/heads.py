"""Other heads for the loaded SOURCE: OUT's, each repeated for its group, the means of groups, or its own in another order.

What is made are the parameters of attention modules by name, which `replaced` puts into a model for a while.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gqa_convert.families.family import Family
from gqa_convert.verify.geometry import MERGED, Geometry, HeadTensor, Kind, Role, find_modules, heads_in, read_geometry

Parameters = Mapping[str, torch.Tensor]
Orders = Mapping[tuple[Kind, int], list[int]]
_ALL: tuple[Role, ...] = (*MERGED, "query", "output")


def attention_parameters(model: Any, family: Family, *, folds: bool) -> dict[str, torch.Tensor]:
    """The parameters of a loaded model's attention that hold heads which a conversion changes.

    Args:
        model: of SOURCE or OUT.
        family: SOURCE's family.
        folds: whether the method changes queries and outputs too.
    """
    parts = [family.fused] if family.fused else [family.key, family.value]
    parts += [family.key_norm_name] if family.key_norm != "none" else []
    parts += [family.query, family.output] if folds else []
    everything = dict(model.named_parameters())
    modules = tuple(f"{module}." for module in find_modules(family, dict.fromkeys(everything, ())))
    return {
        name: parameter.detach()
        for name, parameter in everything.items()
        if name.startswith(modules) and any(f".{part}." in name for part in parts)
    }


def loaded_geometry(family: Family, config: dict[str, Any], model: Any, out: Mapping[str, tuple[int, ...]]) -> Geometry:
    """The geometry of the loaded SOURCE.

    Args:
        family: SOURCE's family.
        config: of SOURCE's decoder.
        model: the loaded SOURCE.
        out: the shapes of the loaded OUT's parameters.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return read_geometry(family, config, shapes, out, may_differ=True)


def repeated_heads(geometry: Geometry, model: Any, out: Parameters, *, folds: bool) -> dict[str, torch.Tensor]:
    """SOURCE's parameters with OUT's heads, each K/V head repeated for its group.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        out: the loaded OUT's attention parameters.
        folds: whether queries and outputs are OUT's too.
    """
    roles = _ALL if folds else MERGED

    def ours(tensor: HeadTensor, role: Role, _: torch.Tensor) -> torch.Tensor | None:
        if role not in roles:
            return None
        kept = tensor.names[: len(tensor.after[role])] if len(tensor.names) > 1 else tensor.names
        heads = heads_in(tensor.upright(_join(out, kept)), tensor.after[role])
        return heads.repeat_interleave(len(tensor.before[role]) // len(heads), 0)

    made = _made(geometry, model, ours)
    biases = [f"{name.removesuffix('.weight')}.bias" for name in made if name.endswith(".weight")]
    return made | {name: out[name] for name in biases if folds and name in out and name not in made}


def pooled_heads(geometry: Geometry, model: Any) -> dict[str, torch.Tensor]:
    """SOURCE's parameters with the mean of each group in place of its K/V heads."""
    sizes = {
        name: module.before // module.after for module in geometry.changed for t in module.tensors for name in t.names
    }

    def means(tensor: HeadTensor, role: Role, heads: torch.Tensor) -> torch.Tensor | None:
        if role not in MERGED:
            return None
        size = sizes[tensor.names[0]]
        return heads.unflatten(0, (-1, size)).mean(1).repeat_interleave(size, 0)

    return _made(geometry, model, means)


def reordered_heads(geometry: Geometry, model: Any, orders: Orders) -> dict[str, torch.Tensor]:
    """SOURCE's parameters with its own K/V heads, and the query heads that read them, in other orders.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        orders: by the kind of attention and the number of the layer, since names may differ in memory.
    """
    order_of: dict[str, list[int]] = {}
    for module in geometry.modules:
        for tensor in module.tensors if (module.kind, module.number) in orders else ():
            order_of |= dict.fromkeys(tensor.names, orders[module.kind, module.number])

    def moved(tensor: HeadTensor, _: Role, heads: torch.Tensor) -> torch.Tensor | None:
        order = order_of.get(tensor.names[0])
        return None if order is None else heads.unflatten(0, (len(order), -1))[order].flatten(0, 1)

    return _made(geometry, model, moved)


def _made(
    geometry: Geometry, model: Any, make: Callable[[HeadTensor, Role, torch.Tensor], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """Parameters of the modules whose heads were merged. `make` returns what replaces the heads of a role; None if they
    stay.
    """
    parameters = dict(model.named_parameters())
    found: dict[str, torch.Tensor] = {}
    merged = [module for module in geometry.changed if module.after < module.before]
    for tensor in [tensor for module in merged for tensor in module.tensors]:
        whole = _join(parameters, tensor.names).clone()
        upright = tensor.upright(whole)
        new = {role: make(tensor, role, heads_in(upright, rows).clone()) for role, rows in tensor.before.items()}
        if all(heads is None for heads in new.values()):
            continue
        for role, heads in new.items():
            if heads is not None:
                upright[tensor.before[role]] = heads
        found |= zip(tensor.names, whole.chunk(len(tensor.names)), strict=True)
    return found


def _join(parameters: Parameters, names: tuple[str, ...]) -> torch.Tensor:
    if len(names) == 1:
        return parameters[names[0]].detach()
    return torch.cat([parameters[name].detach() for name in names])


@contextmanager
def replaced(model: Any, parameters: Parameters) -> Iterator[None]:
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


def output_errors(
    geometry: Geometry, model: Any, run: Callable[[], object], *others: Parameters
) -> dict[str, tuple[float, ...]]:
    """How far the outputs of attention modules are from SOURCE's on SOURCE's own inputs, relative to its outputs.

    Args:
        geometry: of the loaded models.
        model: the loaded SOURCE.
        run: runs it.
        others: the parameters to compare.

    Returns:
        By module, the error with each of the others.
    """
    sums = {module.name: [0.0] * (1 + len(others)) for module in geometry.changed}
    busy = False

    def watch(name: str, module: Any) -> Any:
        own = [
            {key.removeprefix(f"{name}."): each for key, each in other.items() if key.startswith(f"{name}.")}
            for other in others
        ]

        def hook(_: Any, args: Any, options: Any, output: Any) -> None:
            nonlocal busy
            if busy:  # the call below
                return
            busy = True
            expected = _first(output)
            sums[name][0] += float(expected.square().sum())
            for number, parameters in enumerate(own, 1):
                found = _first(torch.func.functional_call(module, parameters, args, options))
                sums[name][number] += float((found.double() - expected).square().sum())
            busy = False

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [watch(name, model.get_submodule(name)) for name in sums]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: tuple((each / total) ** 0.5 if total else 0.0 for each in rest) for name, (total, *rest) in sums.items()
    }


def _first(output: Any) -> torch.Tensor:
    return (output[0] if isinstance(output, tuple) else output).double()
