"""Muon, on whole parameters and on the shards of FSDP2."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gqa_convert.training.adafactor import is_sharded_by_rows, shards_of
from gqa_convert.training.closures import loss_of

_Muon: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)
"""torch's Muon, which torch 2.9 introduced."""


class Muon(_Muon):  # type: ignore[misc]  # torch is not followed
    """torch's Muon (Jordan et al. 2024), which collects every sharded matrix on one process.

    torch's own computes each product of the orthogonalisation of a sharded matrix with all processes, in about a dozen
    collectives per matrix. Here every process orthogonalises its share of the matrices: one exchange brings their parts
    together, and one returns the results, both in bfloat16, in which Muon orthogonalises anyway. Meanwhile a process
    holds about four bfloat16 numbers for each number of its shards.
    """

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient."""
        loss = loss_of(closure)
        every = [group["params"] for group in self.param_groups]
        try:
            for group, parameters in zip(self.param_groups, every, strict=True):
                by_mesh: dict[Any, list[Any]] = {}
                group["params"] = []
                for parameter in parameters:
                    if parameter.grad is not None and is_sharded_by_rows(parameter):
                        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
                    else:
                        group["params"].append(parameter)
                for mesh, sharded in by_mesh.items():
                    self._step_of_shards(sharded, group, shards_of(mesh))
            super().step()
        finally:
            for group, parameters in zip(self.param_groups, every, strict=True):
                group["params"] = parameters
        return loss

    def _step_of_shards(self, parameters: list[Any], group: dict[str, Any], processes: Any) -> None:
        updates = _exchanged(
            [self._direction(parameter, group) for parameter in parameters],
            [parameter.shape for parameter in parameters],
            lambda matrix: orthogonalised(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]),
            processes,
        )
        for parameter, update in zip(parameters, updates, strict=True):
            local = parameter.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"] * _scale(group["adjust_lr_fn"], *parameter.shape))

    def _direction(self, parameter: Any, group: dict[str, Any]) -> Tensor:
        """The momentum of this process's part, in bfloat16."""
        state, gradient = self.state[parameter], parameter.grad.to_local()
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        momentum = state["momentum_buffer"].to_local()
        momentum.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()


def orthogonalised(matrix: Tensor, coefficients: Sequence[float], steps: int, least: float) -> Tensor:
    """A matrix with its singular values near 1, by a quintic Newton-Schulz iteration.

    Args:
        matrix: [n, m], bfloat16.
        coefficients: of the matrix, of its cube and of its fifth power.
        steps: of the iteration.
        least: the least norm by which the matrix is divided.
    """
    first, third, fifth = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=least)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if tall else x


def _scale(kind: str | None, rows: int, columns: int) -> float:
    """The factor of the rate for a matrix of this shape, as torch's Muon has it."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _exchanged(
    parts: list[Tensor], shapes: Sequence[tuple[int, int]], work: Callable[[Tensor], Tensor], processes: Any
) -> list[Tensor]:
    """Apply a function to matrices whose rows are spread over processes, each matrix on one of them.

    Args:
        parts: the rows of each matrix that this process has.
        shapes: of the whole matrices.
        work: the function; its result has the shape of its argument.
        processes: the process group.

    Returns:
        The rows of each result that this process is to have.
    """
    size, rank = torch.distributed.get_world_size(processes), torch.distributed.get_rank(processes)
    owners = _owners(shapes, size)
    order = sorted(range(len(parts)), key=owners.__getitem__)
    mine = [number for number in order if owners[number] == rank]
    rows = [[_rows(shapes[number][0], size, process) for number in mine] for process in range(size)]
    ours = [sum(parts[number].numel() for number in order if owners[number] == process) for process in range(size)]
    theirs = [sum(count * shapes[number][1] for count, number in zip(each, mine, strict=True)) for each in rows]
    received = _all_to_all(torch.cat([parts[number].flatten() for number in order]), ours, theirs, processes)
    columns = [shapes[number][1] for number in mine]
    pieces = [
        block.split([count * width for count, width in zip(each, columns, strict=True)])
        for block, each in zip(received.split(theirs), rows, strict=True)
    ]
    results = []
    for place, width in enumerate(columns):
        whole = torch.cat([each[place].view(-1, width) for each in pieces])
        results.append(work(whole).split([each[place] for each in rows]))
    back = [result[process].flatten() for process in range(size) for result in results]
    returned = _all_to_all(torch.cat(back) if back else received[:0], theirs, ours, processes)
    found = returned.split([parts[number].numel() for number in order])
    by_number = dict(zip(order, found, strict=True))
    return [by_number[number].view_as(part) for number, part in enumerate(parts)]


def _all_to_all(numbers: Tensor, sent: list[int], received: list[int], processes: Any) -> Tensor:
    """Send consecutive runs of numbers to the processes in their order; as bytes, since gloo knows no bfloat16."""
    width = numbers.element_size()
    found = numbers.new_empty(sum(received))
    torch.distributed.all_to_all_single(
        found.view(torch.uint8),
        numbers.contiguous().view(torch.uint8),
        [width * count for count in received],
        [width * count for count in sent],
        group=processes,
    )
    return found


def _owners(shapes: Sequence[tuple[int, int]], size: int) -> list[int]:
    """The process that works on each matrix: the largest first, each on the one with the least work so far."""
    work = [0] * size
    owners = [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: -_operations(shapes[number])):
        owners[number] = work.index(min(work))
        work[owners[number]] += _operations(shapes[number])
    return owners


def _operations(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * min(shape)


def _rows(rows: int, size: int, process: int) -> int:
    """How many rows of a matrix a process has, by the rule of `torch.chunk`."""
    each = -(-rows // size)
    return max(0, min(each, rows - process * each))
