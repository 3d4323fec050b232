"""Loads the models of a run and places them on devices; they may be replicated or sharded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gqa_convert.data.sampler import Batch
from gqa_convert.families.loading import check_complete, explained, read_config
from gqa_convert.losses.output_layer import remove_output_layer
from gqa_convert.processes import started, together
from gqa_convert.sharding import load, replicate, reshard, shard
from gqa_convert.training.lora import add_adapters, loading_options
from gqa_convert.training.opening import NEEDS_HEAD
from gqa_convert.training.optimizers import fix_towers
from gqa_convert.training.recipe import Recipe


def load_student(recipe: Recipe, folder: Path, *, sharded: bool = False) -> Any:
    """The model to train, in float32 on the CPU, without dropout; or with
    adapters, the only trained parameters, on weights in the type that `lora.loading_options` states.

    Raises:
        CorruptCheckpointError: transformers can't load it, or it lacks parameters.
        NoLanguageModelError: the model was saved without its language-model head.
    """
    with explained(recipe.model):
        model, missing = load(folder, **loading_options(recipe), by_first=sharded)
    check_complete(recipe.model, folder, missing, NEEDS_HEAD)
    if recipe.gradient_checkpointing:
        recompute(model)
    turn_dropout_off(model)
    fix_towers(model)
    if recipe.lora:
        add_adapters(model, recipe.lora)
    return model.train()


def recompute(model: Any) -> None:
    """Recompute the activations of every layer in the backward pass."""
    # in older transformers it has another name
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def place(model: Any, device: Any, *, sharded: bool, bf16: bool) -> Any:
    """Place a model on a device of this process: sharded or whole, and with the gradients of all processes if it is
    trained.
    """
    if sharded:
        return shard(model, device, bf16=bf16)
    model.to(device)
    if model.training and started() > 1:
        return replicate(model)
    return model


def load_frozen(folder: Path, device_type: str, *, sharded: bool = False) -> Any:
    """A teacher or a source on the CPU, in evaluation mode and without gradients.

    It has its checkpoint's dtype, but for a GPU bfloat16 instead of float32, whose products take several times as long.

    Raises:
        CorruptCheckpointError: transformers can't load it, or it lacks parameters.
        NoLanguageModelError: it was saved without its language-model head.
    """
    config = read_config(folder)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = torch.bfloat16 if stored == "float32" and device_type == "cuda" else "auto"
    with explained(str(folder)):
        model, missing = load(folder, dtype, by_first=sharded)
    check_complete(
        str(folder),
        folder,
        missing,
        "distillation needs a teacher with a language-model head; name one",
    )
    return model.requires_grad_(False)


def teacher_logits(teacher: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """The teacher's logits [b, L, V], or its states [b, L, d] if its output layer was removed.

    Autocasting, which may be active for the student, is disabled: the teacher computes in its own dtype.

    Args:
        teacher: the model from `load_frozen`.
        inputs: those of the student's forward pass.
    """
    with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
        return teacher(**inputs, use_cache=False).logits


def remove_output(model: Any, sample: Batch) -> bool:
    """Take the output layer out of a model, so that no batch's logits are held as a whole; returns whether that was
    possible. Every process calls this.

    Args:
        model: the model.
        sample: on which it is tried.
    """
    inputs, _ = on_device(sample, model)
    with together():
        removed = remove_output_layer(model, inputs)
    reshard(model)
    return removed


def on_device(batch: Batch, model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """A batch on a model's device: the inputs of its forward pass, and the labels."""
    device = next(model.parameters()).device
    inputs = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
        for name, array in batch.items()
    }
    return inputs, inputs.pop("labels")


def turn_dropout_off(model: Any) -> None:
    """Set every dropout of a transformers model to 0: in modules, in the numbers that attention passes to its function,
    and in the config that modules may read. Uptraining continues pretraining, which T5 1.1 and most decoders did
    without dropout. The probability of dropping whole layers (`layerdrop`) is not changed.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    for holder in (*model.modules(), model.config):
        for name, value in list(vars(holder).items()):
            named = "dropout" in name or "pdrop" in name
            if named and isinstance(value, float) and "classifier" not in name:
                setattr(holder, name, 0.0)
