"""Adafactor, on whole parameters and on the shards of FSDP2."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

LEAST_FACTORED = 128
"""Matrices with a shorter side are not factored."""
_LEAST_SQUARE = 1e-30


class Adafactor(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """Adafactor (Shazeer & Stern 2018) in T5's configuration: the learning rate is scaled by each parameter's rms, and
    there is no first moment.

    For a parameter w with gradient g at step t, where rms(x) is the root mean square of x's elements:

        decay = 1 - t^-0.8
        v     = decay * v + (1 - decay) * (g^2 + 1e-30)
        u     = g / sqrt(v)
        w     = w - lr * max(1e-3, rms(w)) * u / max(1, rms(u) / clipping)

    Of a matrix's v, only the row means r and the column means c are kept, and v = r c / mean(r).

    transformers' Adafactor with `scale_parameter=True, relative_step=False` computes the same; torch's Adafactor bounds
    v differently and caps the rate at 1 / sqrt(t). Neither of them supports parameters that FSDP2 has sharded. This one
    does: sums over the sharded dimension are reduced for all parameters at once, in two collectives per step. Like T5's
    own code, it does not factor matrices with a side below 128.

    Args:
        params: parameters or groups of them.
        lr: the learning rate before scaling. T5 used 1e-3 in fine-tuning and at the millionth step of pretraining.
        clipping: the largest rms of an update before scaling.
        weight_decay: decoupled weight decay, multiplied by the same scaled rate; T5 used none.
        least_factored: matrices with a shorter side are not factored.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        clipping: float = 1.0,
        weight_decay: float = 0.0,
        least_factored: int = LEAST_FACTORED,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "clipping": clipping, "weight_decay": weight_decay, "least_factored": least_factored}
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sharded: dict[Any, list[_Shard]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if is_sharded_by_rows(parameter):
                    each = _Shard(parameter, group, self.state[parameter])
                    sharded.setdefault(parameter.device_mesh, []).append(each)
                else:
                    self._update(parameter, group)
        for mesh, shards in sharded.items():
            _step_of_shards(shards, shards_of(mesh))
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a whole parameter, or one that is sharded in another way, whose sums are reduced one by one."""
        gradient, weight = parameter.grad.float(), parameter.float()
        square = gradient.square() + _LEAST_SQUARE
        factored = _is_factored(parameter, group)
        means = {"rows": _mean(square, -1), "columns": _mean(square, -2)} if factored else {"squares": square}
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update({name: torch.zeros_like(mean) for name, mean in means.items()})
        new_share = _new_share(state)
        for name, mean in means.items():
            state[name].mul_(1 - new_share).add_(mean, alpha=new_share)
        if factored:
            rows, columns = state["rows"], state["columns"]
            update = gradient * (rows / _mean(rows, -2)).rsqrt() * columns.rsqrt()
        else:
            update = gradient * state["squares"].rsqrt()
        scale = group["lr"] * _rms(weight).clamp(min=1e-3)
        update = update * (scale / (_rms(update) / group["clipping"]).clamp(min=1.0))
        if group["weight_decay"]:
            update = update + weight * (scale * group["weight_decay"])
        parameter.copy_(weight - update)


def is_sharded_by_rows(parameter: Tensor) -> bool:
    """Whether a parameter is sharded in its first dimension over the last dimension of a mesh of processes, and
    replicated over the others, as FSDP2 does it.
    """
    return isinstance(parameter, DTensor) and tuple(parameter.placements) == _by_rows(parameter.device_mesh)


def shards_of(mesh: Any) -> Any:
    """The process group over which parameters of a mesh are sharded by rows."""
    return mesh.get_group(mesh.ndim - 1)


def _by_rows(mesh: Any) -> tuple[Any, ...]:
    return (*[Replicate()] * (mesh.ndim - 1), Shard(0))


def _is_factored(parameter: Tensor, group: dict[str, Any]) -> bool:
    return parameter.ndim >= 2 and bool(min(parameter.shape[-2:]) >= group["least_factored"])


def _new_share(state: dict[str, Any]) -> float:
    """Count a step; returns the weight of the new squares."""
    state["step"] += 1
    return float(float(state["step"]) ** -0.8)


class _Shard:
    """The part of a parameter on this process, during a step.

    Args:
        parameter: sharded by rows.
        group: its options.
        state: its moments, which begin with zeros.
    """

    def __init__(self, parameter: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.group, self.shape = group, parameter.shape
        self._parameter = parameter.to_local()
        self._gradient: Tensor = parameter.grad.to_local().float()
        self._factored = _is_factored(parameter, group)
        self._reduces = self._factored and parameter.ndim == 2
        """Whether the dimension over which columns are summed is the sharded one."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(self._zeros(parameter))
        self._share = _new_share(state)
        self._moments = {name: value.to_local() for name, value in state.items() if name != "step"}

    def _zeros(self, parameter: Any) -> dict[str, DTensor]:
        mesh, shape = parameter.device_mesh, tuple(parameter.shape)
        local = tuple(self._gradient.shape)
        by_rows, whole = _by_rows(mesh), (*[Replicate()] * mesh.ndim,)
        if not self._factored:
            return {"squares": _dtensor(self._gradient.new_zeros(local), mesh, by_rows, shape)}
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        if self._reduces:
            second = _dtensor(self._gradient.new_zeros(columns), mesh, whole, columns)
        else:
            second = _dtensor(self._gradient.new_zeros((local[0], *columns[1:])), mesh, by_rows, columns)
        return {"rows": _dtensor(self._gradient.new_zeros((*local[:-1], 1)), mesh, by_rows, rows), "columns": second}

    def first_sums(self) -> list[Tensor]:
        """Update the moments as far as this process can; returns the sums that all processes are needed for."""
        square = self._gradient.square().add_(_LEAST_SQUARE)
        sums = [self._parameter.float().square().sum().view(1)]
        if not self._factored:
            self._add("squares", square)
            return sums
        self._add("rows", square.mean(-1, keepdim=True))
        if self._reduces:
            return [*sums, self._moments["rows"].sum().view(1), square.sum(0)]
        self._add("columns", square.mean(-2, keepdim=True))
        return sums

    def second_sums(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Take the sums over all processes; returns the sum of the squared update on this one."""
        self._scale = self.group["lr"] * (sums[0] / self.shape.numel()).sqrt().clamp(min=1e-3)
        if self._reduces:
            self._add("columns", sums[2] / self.shape[0])
            self._mean_row: Tensor = sums[1] / self.shape[0]
        elif self._factored:
            self._mean_row = self._moments["rows"].mean(-2, keepdim=True)
        return [self._update().square_().sum().view(1)]

    def apply(self, sums: Sequence[Tensor]) -> None:
        """Update the parameter, with the sum of the squared update over all processes."""
        rms = (sums[0] / self.shape.numel()).sqrt()
        update = self._update().mul_(self._scale / (rms / self.group["clipping"]).clamp(min=1.0))
        weight = self._parameter.float()
        if self.group["weight_decay"]:
            update.add_(weight * (self._scale * self.group["weight_decay"]))
        self._parameter.copy_(weight - update)

    def _update(self) -> Tensor:
        """g / sqrt(v), computed twice per step rather than kept, since it is as large as the gradient."""
        if not self._factored:
            return self._gradient * self._moments["squares"].rsqrt()
        return (self._gradient * (self._moments["rows"] / self._mean_row).rsqrt()).mul_(
            self._moments["columns"].rsqrt()
        )

    def _add(self, name: str, mean: Tensor) -> None:
        self._moments[name].mul_(1 - self._share).add_(mean, alpha=self._share)


def _step_of_shards(shards: list[_Shard], processes: Any) -> None:
    """A step of parameters that are sharded over the same processes, in two collectives."""
    sums = _reduced([shard.first_sums() for shard in shards], processes)
    sums = _reduced([shard.second_sums(each) for shard, each in zip(shards, sums, strict=True)], processes)
    for shard, each in zip(shards, sums, strict=True):
        shard.apply(each)


def _reduced(parts: list[list[Tensor]], processes: Any) -> list[list[Tensor]]:
    """The sums of tensors over all processes, in one collective."""
    flat = torch.cat([tensor for part in parts for tensor in part])
    torch.distributed.all_reduce(flat, group=processes)
    found = iter(flat.split([len(tensor) for part in parts for tensor in part]))
    return [[next(found) for _ in part] for part in parts]


def _dtensor(local: Tensor, mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _mean(numbers: Tensor, dim: int) -> Tensor:
    """The mean over one dimension, which is kept with length 1; identical on every process."""
    return _summed(numbers.sum(dim, keepdim=True)) / numbers.shape[dim]


def _rms(numbers: Tensor) -> Tensor:
    return (_summed(numbers.square().sum()) / numbers.numel()).sqrt()


def _summed(numbers: Tensor) -> Tensor:
    """The tensor with partial sums reduced across processes if it is a DTensor."""
    if not isinstance(numbers, DTensor):
        return numbers
    return numbers.redistribute(
        placements=[Replicate() if isinstance(place, Partial) else place for place in numbers.placements]
    )
