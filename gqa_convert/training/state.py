"""What a checkpoint of a run holds of model and optimizer, the same for every way of spreading them over processes."""

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and moments by name, those of this process where they are sharded."""
    if not optimizer.state:  # all steps so far were skipped, or this run is yet to go on
        get_state_dict(model, optimizer)  # makes moments by a step with zeros, which must not count
        for moments in optimizer.state.values():
            if "step" in moments:
                moments["step"].zero_()
    tensors, moments = get_state_dict(model, optimizer)
    return {"model": tensors, "optimizer": moments}


def set_state(model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put what `state_of` returned back in place."""
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole_model(model: Any) -> dict[str, Any]:
    """All parameters on the CPU, gathered from all processes; of use on the main one."""
    tensors: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return tensors
