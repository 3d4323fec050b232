"""The state of model and optimizer in a checkpoint, independent of how they are distributed over processes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

StateDict = dict[str, Any]
"""Tensors by name, nested as torch.distributed.checkpoint saves and loads them."""


def state_of(model: Any, optimizer: torch.optim.Optimizer, *, trained_only: bool = False) -> StateDict:
    """Parameters and optimizer moments by name; if they are sharded, the part of this process.

    Args:
        model: the model or its wrapper for several processes.
        optimizer: of its trained parameters.
        trained_only: leave out the fixed parameters, which a model with adapters reads from its checkpoint.
    """
    if trained_only:
        moments = get_optimizer_state_dict(model, optimizer) if optimizer.state else _fresh_moments(model, optimizer)
        return {"model": {name: each.detach() for name, each in _trained(model)}, "optimizer": moments}
    if not optimizer.state:  # all steps so far were skipped, or none has been taken
        get_state_dict(model, optimizer)  # creates the moments by a step with zero gradients, which must not count
        for moments in optimizer.state.values():
            if "step" in moments:
                moments["step"].zero_()
    tensors, moments = get_state_dict(model, optimizer)
    return {"model": tensors, "optimizer": moments}


def _fresh_moments(model: Any, optimizer: torch.optim.Optimizer) -> StateDict:
    """The moments before the first step, which a step with zero gradients creates and does not count."""
    get_optimizer_state_dict(model, optimizer)
    for moments in optimizer.state.values():
        if "step" in moments:
            moments["step"].zero_()
    return get_optimizer_state_dict(model, optimizer)  # type: ignore[no-any-return]


def _trained(model: Any) -> Iterator[tuple[str, Any]]:
    inner = model.module if hasattr(model, "module") else model
    return ((name, each) for name, each in inner.named_parameters() if each.requires_grad)


def set_state(model: Any, optimizer: torch.optim.Optimizer, state: StateDict, *, trained_only: bool = False) -> None:
    """Restore a state that `state_of` returned."""
    if trained_only:
        with torch.no_grad():
            for name, parameter in _trained(model):
                parameter.copy_(state["model"][name])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole_model(model: Any) -> StateDict:
    """All parameters on the CPU, gathered from all processes onto the main one."""
    tensors: StateDict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return tensors
