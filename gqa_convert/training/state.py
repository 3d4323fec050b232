"""The state of model and optimizer in a checkpoint, independent of how they are distributed over processes."""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

StateDict = dict[str, Any]
"""Tensors by name, nested as torch.distributed.checkpoint saves and loads them."""


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> StateDict:
    """Parameters and optimizer moments by name; if they are sharded, the part of this process."""
    if not optimizer.state:  # all steps so far were skipped, or none has been taken
        get_state_dict(model, optimizer)  # creates the moments by a step with zero gradients, which must not count
        for moments in optimizer.state.values():
            if "step" in moments:
                moments["step"].zero_()
    tensors, moments = get_state_dict(model, optimizer)
    return {"model": tensors, "optimizer": moments}


def set_state(model: Any, optimizer: torch.optim.Optimizer, state: StateDict) -> None:
    """Restore a state that `state_of` returned."""
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole_model(model: Any) -> StateDict:
    """All parameters on the CPU, gathered from all processes onto the main one."""
    tensors: StateDict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return tensors
