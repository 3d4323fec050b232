"""Trains low-rank adapters on fixed weights, with PEFT, and merges them for the export."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gqa_convert.errors import LaunchError, MissingExtraError, RecipeError
from gqa_convert.families.loading import load_model
from gqa_convert.training.checkpoints import StateDict
from gqa_convert.training.optimizers import modules_of_text
from gqa_convert.training.recipe import Lora, Recipe


def check_lora(lora: Lora | None, *, sharded: bool) -> None:
    """Refuse adapters that can't be trained, before anything is loaded.

    Args:
        lora: the settings; None is not refused.
        sharded: whether the model would be sharded.

    Raises:
        MissingExtraError: PEFT is not installed.
        LaunchError: the model would be sharded.
    """
    if lora is None:
        return
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(
            "lora needs PEFT, which is not installed: pip install 'gqa-convert[lora]'"
        )
    if sharded:
        raise LaunchError(
            "lora trains adapters beside whole weights, and the launch or the recipe asks for FSDP: launch with "
            "recipes/accelerate/multi_gpu.yaml, or set sharding to replicate"
        )


def loading_options(recipe: Recipe) -> dict[str, Any]:
    """How weights are loaded: in float32, or if they are fixed, in bfloat16 or in 4 bits.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    lora = recipe.lora
    dtype = torch.bfloat16 if lora and recipe.precision == "bf16" else torch.float32
    if not lora or not lora.quantize:
        return {"dtype": dtype}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            f"lora.quantize is {lora.quantize}, which needs bitsandbytes: pip install 'gqa-convert[qlora]', or remove quantize"
        )
    from transformers import BitsAndBytesConfig

    return {
        "dtype": dtype,
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=lora.quantize,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
    }


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Fix the model's parameters, and add float32 adapters that change nothing yet.

    Raises:
        RecipeError: no module can have an adapter.
    """
    # where bitsandbytes is installed, PEFT imports it, and it reports kernels that it does without
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=lora.rank, lora_alpha=lora.rank, target_modules=target_modules(model))
    model.requires_grad_(False)
    inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def target_modules(model: Any) -> list[str]:
    """The names of the modules that get an adapter: every linear layer that text passes, but the output layer.

    Raises:
        RecipeError: there is none.
    """
    from transformers.pytorch_utils import Conv1D

    inside = modules_of_text(model) - {model.get_output_embeddings()}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module in inside
    ]
    if not linear:
        raise RecipeError(
            f"model type {model.config.model_type!r} has no linear layer for adapters: remove lora"
        )
    return linear


def merged_model(trained: nn.Module, folder: Path) -> tuple[Any, StateDict]:
    """The checkpoint's model with the adapters' products added to its weights, and its tensors, on the CPU.

    The products are added to the weights of the checkpoint itself, not to those that were rounded to bfloat16 or 4 bits
    for training.

    Args:
        trained: the model with adapters.
        folder: the checkpoint that training began with.
    """
    model, _ = load_model(folder, "auto")
    for name, module in trained.named_modules():
        if hasattr(module, "lora_A"):
            weight = model.get_submodule(name).weight
            with torch.no_grad():
                delta = module.get_delta_weight("default").to("cpu", torch.float32)
                weight.copy_(weight.float() + delta)
    return model, dict(model.state_dict())
