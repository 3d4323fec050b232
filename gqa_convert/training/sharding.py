"""Distributes a model over processes: as a copy on each (DDP), or with parameters, gradients and moments sharded layer
by layer (FSDP2).

accelerate's own FSDP switch silently becomes DDP on CPUs, and its `no_sync` keeps whole gradients on every process, so
this is done here, from the same configuration.
"""

import os
from collections.abc import Iterator
from typing import Any

from gqa_convert.errors import LaunchError
from gqa_convert.training.distributed import is_set
from gqa_convert.training.recipe import Sharding


def number_of_shards(sharding: Sharding, processes: int) -> int:
    """Over how many processes each parameter is sharded; 1 if every process holds whole parameters.

    Args:
        sharding: the recipe's `sharding`; `auto` is what the launcher's configuration asks for (`distributed_type: FSDP`
            of accelerate).
        processes: the number of processes.
    """
    if sharding == "full" or (sharding == "auto" and is_set(os.environ, "ACCELERATE_USE_FSDP")):
        return processes
    return 1


def is_sharded(model: Any) -> bool:
    """Whether `shard` has sharded a model."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def replicate(model: Any, device: Any) -> Any:
    """Copy the model to every process; gradients are averaged in the backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    devices = [device] if device.type == "cuda" else None
    # find_unused_parameters is not needed: transformers 5 holds all experts of a layer in one tensor, idle ones too
    return DistributedDataParallel(
        model.to(device), device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False
    )


def shard(model: Any, device: Any, *, bf16: bool) -> Any:
    """Shard a model in place over all processes. Matrix products are computed in bfloat16 if `bf16`, and gradients are
    summed in float32.

    Args:
        model: the model on the CPU, with the same numbers on every process, so that the device holds one whole layer at
            a time.
        device: the device of this process.
        bf16: compute in bfloat16; parameters and optimizer state keep their dtype.

    Raises:
        LaunchError: layers of the model share parameters.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = {name for name, _ in model.named_parameters()}
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # parameters outside the layers are needed again immediately, by the loss and in a backward pass
    model = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if apart := [name for name, _ in model.named_parameters() if name not in names]:
        raise LaunchError(
            f"{apart[0]} is shared with another layer, and FSDP2 would train the two separately ({len(apart)} in all): launch with "
            "recipes/accelerate/multi_gpu.yaml"
        )
    return model


def unwrapped(model: Any) -> Any:
    """The transformers model in the wrapper of `replicate`, or as it is."""
    return model.module if hasattr(model, "module") else model


def reshard(model: Any) -> None:
    """Reshard the parameters that a forward pass without a backward pass leaves unsharded, because the optimizer needs
    shards. A model that is not sharded stays as it is.
    """
    for module in model.modules():
        if is_sharded(module):
            module.reshard()


def layers(model: Any) -> Iterator[Any]:
    """The repeated blocks of a model, which its class declares as not to be split, innermost first."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in reversed(list(model.modules())):
        if type(module).__name__ in names or isinstance(module, GradientCheckpointingLayer):
            yield module


def set_gradient_sync(model: Any, sync: bool) -> None:
    """Set whether the next forward and backward pass averages the gradients of all copies of the model. The shards of a
    model always reduce theirs; otherwise each process would hold whole gradients.
    """
    if hasattr(model, "require_backward_grad_sync"):  # DDP
        model.require_backward_grad_sync = sync
