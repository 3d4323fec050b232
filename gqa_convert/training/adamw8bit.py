"""AdamW whose moments have 8 bits (Dettmers et al. 2022): torchao's, with a state that checkpoints can hold.

torchao keeps a moment as a tensor of a class of its own. A checkpoint needs ordinary tensors, and it must not depend on
how parameters are sharded. The state of a matrix is therefore its codes, in the shape of the matrix, and its scales, one
for each 256 numbers of a row. Parameters whose rows are no multiple of 256, and small ones, keep moments in float32.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

BLOCK = 256
"""Numbers of a row that share a scale."""
_LEAST = 4096
"""The numbers of the smallest parameter whose moments have 8 bits, as in bitsandbytes and torchao."""
_SCALE = "_scale"
"""What the name of a moment's scales has behind that of the moment."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW8bit(AdamW8bit):  # type: ignore[misc]  # torchao is not followed
    """torchao's AdamW8bit, whose state dict holds ordinary tensors and whose learning rates may be plain numbers."""

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """An empty moment; whether it has 8 bits depends on the whole parameter alone."""
        if p.numel() >= _LEAST and p.shape[-1] % BLOCK == 0 and _local(p).numel():
            moment: Tensor = super()._new_buffer(p, signed)
            return moment
        return torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, compiled on a GPU."""
        for group in self.param_groups:
            if not isinstance(group["lr"], Tensor):  # as a tensor, another rate compiles nothing anew
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        on_gpu = self.param_groups[0]["params"][0].device.type == "cuda"
        with nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
            return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The state, with the codes and the scales of each moment as tensors of their own."""
        found: dict[str, Any] = super().state_dict()
        for group in found["param_groups"]:
            group["lr"] = float(group["lr"])
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in found["state"]:
                found["state"][number] = _flat(parameter, found["state"][number])
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= {key: value for key, value in saved.items() if key != "params"}
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                if number in state_dict["state"]:
                    self._restore(parameter, state_dict["state"][number])

    def _restore(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = saved["step"].clone()
        for name in _MOMENTS:
            moment = self._new_buffer(parameter, name == "exp_avg")
            local, value = _local(moment), _local(saved[name])
            if isinstance(local, OptimState8bit):
                local.codes.copy_(value)
                local.scale.copy_(_local(saved[name + _SCALE]).flatten())
            elif value.numel():
                local.copy_(value)
            state[name] = moment


def _local(tensor: Tensor) -> Any:
    """The part of a sharded tensor that this process holds; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter in ordinary tensors."""
    found = dict(state)
    for name in _MOMENTS:
        moment = state[name]
        local = _local(moment)
        in_bits = parameter.numel() >= _LEAST and parameter.shape[-1] % BLOCK == 0
        if not in_bits:
            continue
        rows = (*local.shape[:-1], parameter.shape[-1] // BLOCK)
        if isinstance(local, OptimState8bit):
            codes, scale = local.codes, local.scale.view(rows)
        else:  # a process without a row of this parameter
            codes, scale = local.to(torch.uint8), local.new_zeros(rows)
        found[name], found[name + _SCALE] = _as_shards(parameter, codes), _as_shards(parameter, scale)
    return found


def _as_shards(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor that is sharded like a parameter, whose rows may have another length."""
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size((*parameter.shape[:-1], local.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    whole: Tensor = DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
    return whole
