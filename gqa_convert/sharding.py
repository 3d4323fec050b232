"""Distributes a model over processes: as a copy on each (DDP), or with parameters, gradients and
moments sharded layer by layer, over all processes (FSDP2) or over those of each machine (HSDP).

accelerate's own FSDP switch silently becomes DDP on CPUs, and its `no_sync` keeps whole gradients
on every process, so this is done here, from the same configuration.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gqa_convert.errors import LaunchError
from gqa_convert.families.loading import load_model, outline_model, untie
from gqa_convert.processes import by_first, check_agreement, gathered, is_set, rank, started


def number_of_shards(sharding: str, processes: int, of_machine: int | None = None) -> int:
    """Over how many processes each parameter is sharded; 1 if every process holds whole parameters.

    Args:
        sharding: the recipe's `sharding`; `auto` is what the launcher's configuration asks for
            (`distributed_type: FSDP` of accelerate).
        processes: the number of processes.
        of_machine: how many of them a machine has; None for what the launcher states.

    Raises:
        LaunchError: the machines have unequally many.
    """
    if sharding == "hybrid":
        shards = min(of_machine or int(os.getenv("LOCAL_WORLD_SIZE", processes)), processes)
        if processes % shards:
            raise LaunchError(
                f"sharding is hybrid, and of {processes} processes {shards} are on this machine: "
                "start as many on each"
            )
        return shards
    if sharding == "full" or (sharding == "auto" and is_set("ACCELERATE_USE_FSDP")):
        return processes
    return 1


def load(
    folder: Path, dtype: Any, *, by_first: bool = False, **options: Any
) -> tuple[Any, list[str]]:
    """Load a model as `loading.load_model` does.

    Args:
        folder: a local checkpoint.
        dtype: a torch dtype, or `auto`.
        by_first: only the first process reads weights, for a model that `shard` will send to the
            others. Otherwise a machine with eight GPUs would hold eight whole copies before
            sharding.
        options: further options of `from_pretrained`, for models that are not sharded.
    """
    if by_first and rank():
        # a class that can't be built without its weights, or an error that the first process
        # reports
        with suppress(Exception):
            return outline_model(folder), []
    return load_model(folder, dtype, **options)


def replicate(model: Any) -> Any:
    """Wrap the model on this process's device; gradients of all processes are averaged in the
    backward pass.
    """
    # find_unused_parameters is not needed: transformers 5 holds all experts of a layer in one
    # tensor, idle ones too
    return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)


def shard(model: Any, device: Any, *, bf16: bool, shards: int | None = None) -> Any:
    """Shard a model in place. Matrix products are computed in bfloat16 if `bf16`, and gradients are
    summed in float32.

    Args:
        model: the model on the CPU, so that the device holds one whole layer at a time. The first
            process's numbers are used.
        device: the device of this process.
        bf16: compute in bfloat16; parameters and optimizer state keep their dtype.
        shards: over how many processes each parameter is sharded, of which there are as many copies
            as the processes allow; None for all.

    Raises:
        LaunchError: layers of the model share parameters.
    """
    _match_the_first(model)
    names = {name for name, _ in model.named_parameters()}
    numbers = {} if rank() else model.state_dict()
    mesh = device_mesh(device.type, shards or started())
    dtype = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers(model):
        for module in (*_of_other_dtypes(layer), layer):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    # parameters outside the layers are needed again immediately, by the loss and in a backward pass
    model = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if apart := [name for name, _ in model.named_parameters() if name not in names]:
        raise LaunchError(
            f"{apart[0]} is shared with another layer, and FSDP2 would train the two separately "
            f"({len(apart)} in all): launch with recipes/accelerate/multi_gpu.yaml"
        )
    set_model_state_dict(
        model, numbers, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for buffer in model.buffers():  # buffers that no checkpoint holds are not in the state
        torch.distributed.broadcast(buffer, src=0)
    return model


def device_mesh(device_type: str, shards: int) -> Any:
    """The processes as FSDP2 takes them: in one dimension, over which parameters are sharded; or
    where several groups of processes hold all of them, in two, [copies, shards].
    """
    copies = started() // shards
    config = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards)
    return config.build_device_mesh(device_type)


def _of_other_dtypes(layer: Any) -> list[Any]:
    """The modules of a layer with a parameter in another dtype than the layer's first, such as an
    expert router that transformers keeps in float32. FSDP2 gathers parameters of one dtype
    together.
    """
    first = next(layer.parameters()).dtype
    return [
        module
        for module in layer.modules()
        if any(each.dtype != first for each in module.parameters(recurse=False))
    ]


def unwrapped(model: Any) -> Any:
    """The transformers model in the wrapper of `replicate`, or as it is."""
    return getattr(model, "module", model)


def reshard(model: Any) -> None:
    """Reshard the parameters that a forward pass without a backward pass leaves unsharded, because
    the optimizer needs shards. A model that is not sharded stays as it is.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _match_the_first(model: Any) -> None:
    """Give the model the tensors of the first process, in their dtypes; numbers follow later.

    Only the first process may have read weights. It alone finds an output layer that is stored
    where the config says that the embeddings serve as one, and transformers keeps some tensors in
    float32 when it reads them.

    Raises:
        LaunchError: the models differ in more than that.
    """
    tensors = _tensors(model)
    types = by_first(lambda: {name: tensor.dtype for name, tensor in tensors.items()})
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name in types and name not in tensors:
            untie(model, name)
    tensors = _tensors(model)
    for name, tensor in tensors.items():
        if tensor.dtype != (dtype := types.get(name, tensor.dtype)):
            tensor.data = torch.empty_like(tensor, dtype=dtype)
    check_agreement({name: list(tensor.shape) for name, tensor in tensors.items()})


def _tensors(model: Any) -> dict[str, Any]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def layers(model: Any) -> Iterator[Any]:
    """The repeated blocks of a model, which its class declares as not to be split, innermost
    first.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = model._no_split_modules or ()
    for module in reversed(list(model.modules())):
        if type(module).__name__ in names or isinstance(module, GradientCheckpointingLayer):
            yield module


def is_sharded(model: Any) -> bool:
    """Whether `shard` has sharded a model."""
    return isinstance(model, FSDPModule)


def idle_passes(model: Any, own: int) -> int:
    """How many passes of no use a process adds to its own, since all run a sharded model equally
    often. Every process calls this.
    """
    return max(gathered(own)) - own if is_sharded(model) else 0


def shard_as(model: Any, module: Any) -> None:
    """Shard a module that was added to a sharded model."""
    fully_shard(module, mesh=next(model.parameters()).device_mesh)


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether this process holds a shard of a tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which each process may hold a shard. Every process calls this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A whole tensor where another one of its shape is: on its device, or as shards."""
    tensor = tensor.to(other.device)
    if isinstance(other, DTensor):
        return distribute_tensor(tensor, other.device_mesh, other.placements)
    return tensor


@contextmanager
def weights_by_hand(model: Any, layers: Iterable[str]) -> Iterator[None]:
    """A context in which FSDP2 gathers and frees nothing by itself, so that processes may run
    different layers, end a pass early, and run unequally many. Weights outside the layers are whole
    inside the context, those of a layer inside `whole_weights`. A model that is not sharded stays
    as it is.

    Args:
        model: loaded on every process.
        layers: the names of its layers.
    """
    within = {module for name in layers for module in model.get_submodule(name).modules()}
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with ExitStack() as stack:
        for module in sharded:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in hooks.items():
                    owner = type(getattr(hook, "__self__", None))
                    if owner.__module__.startswith("torch.distributed.fsdp"):
                        stack.callback(hooks.__setitem__, key, hook)
                        hooks[key] = _nothing
        for module in sharded:
            if module not in within:
                stack.enter_context(_unsharded(module))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """A hook that changes nothing."""


@contextmanager
def whole_weights(module: Any) -> Iterator[None]:
    """A context in which a module of a model, sharded or not, has whole weights. Every process
    enters it.
    """
    with ExitStack() as stack:
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                stack.enter_context(_unsharded(inner))
        yield


@contextmanager
def _unsharded(module: FSDPModule) -> Iterator[None]:
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
