"""FSDP2: parameters, gradients and optimizer state split over all processes, layer by layer.

accelerate's own switch becomes plain DDP on CPUs without a word, so that sharding is done here, from the same configuration.
"""

import os
from collections.abc import Iterator
from typing import Any


def wanted() -> bool:
    """Whether the launcher's configuration asks for FSDP (`distributed_type: FSDP` of accelerate)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")


def shard(model: Any, device: Any, processes: int, *, bf16: bool) -> Any:
    """Split a model in place over all processes; matrix products in bfloat16 if asked for, sums of gradients in float32.

    Args:
        model: whole, on every process.
        device: of this process.
        processes: how many there are.
        bf16: compute in bfloat16; parameters and optimizer state stay as they are.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def layers(model: Any) -> Iterator[Any]:
    """The repeated blocks of a model: what its class says must not be split, innermost first."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names or isinstance(module, GradientCheckpointingLayer):
            yield module


def set_gradient_sync(model: Any, sync: bool) -> None:
    """Whether the next backward pass adds up the gradients of all processes."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sync)
    elif hasattr(model, "require_backward_grad_sync"):  # DDP
        model.require_backward_grad_sync = sync
