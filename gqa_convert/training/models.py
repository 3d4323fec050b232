"""The models of a run: the student with what of it is trained, its weights or adapters, and the
teacher.
"""

import importlib.util
import logging
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from gqa_convert.errors import LaunchError, MissingExtraError, RecipeError, first_line
from gqa_convert.families.composite import is_composite
from gqa_convert.families.loading import check_complete, explained, read_config
from gqa_convert.processes import started
from gqa_convert.sharding import layers, load, replicate, reshard, shard

from .opening import NEEDS_HEAD
from .recipe import Lora, Recipe

_OTHERWISE_IN_TRAINING = ("moe_token_dropout", "moe_eval_capacity_token_fraction")
"""What the experts and the routers of NLLB-MoE have, which compute something else in training."""
_TRIED = 8
"""Tokens of each of two documents that are tried."""
_ROUNDING = 32
"""Of logits, as a multiple of what their type resolves."""


def load_student(recipe: Recipe, folder: Path, *, sharded: bool = False) -> Any:
    """The model to train, on the CPU, without dropout: in float32; or with adapters, which alone
    are trained, on weights in bfloat16 or 4 bits. If it will be sharded, the first process alone
    reads its weights.

    Raises:
        CorruptCheckpointError: transformers can't load it, or it lacks parameters.
        NoLanguageModelError: the model was saved without its language-model head.
        MissingExtraError: bitsandbytes is not installed.
        RecipeError: no module can have an adapter.
    """
    with explained(recipe.model):
        options = loading_options(recipe, sharded=sharded)
        model, missing = load(folder, **options, by_first=sharded)
    check_complete(recipe.model, folder, missing, NEEDS_HEAD)
    if recipe.gradient_checkpointing:
        recompute(model)
    turn_dropout_off(model)
    fix_towers(model)
    if recipe.lora:
        add_adapters(model, recipe.lora)
    return model.train()


def load_teacher(folder: Path, device_type: str, *, sharded: bool = False) -> Any:
    """A teacher on the CPU, in evaluation mode and without gradients. If it will be sharded, the
    first process alone reads its weights.

    It has its checkpoint's dtype, but for a GPU bfloat16 instead of float32, whose products take
    several times as long.

    Raises:
        CorruptCheckpointError: transformers can't load it, or it lacks parameters.
        NoLanguageModelError: it was saved without its language-model head.
    """
    config = read_config(folder)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = torch.bfloat16 if stored == "float32" and device_type == "cuda" else "auto"
    with explained(str(folder)):
        model, missing = load(folder, dtype, by_first=sharded)
    advice = "distillation needs a teacher with a language-model head; name one"
    check_complete(str(folder), folder, missing, advice)
    return model.requires_grad_(False)


def share_weights(teacher: Any, student: Any) -> float:
    """Let a teacher use the fixed weights of a student with adapters wherever both have the same
    numbers in the same type: all but attention's, where the teacher is the student's source.

    Returns:
        The share of the teacher's weights that need no memory of their own.
    """
    fixed = {}
    for name, parameter in student.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            fixed[name.replace(".base_layer.", ".")] = parameter
    shared = total = 0
    for name, parameter in list(teacher.named_parameters(remove_duplicate=False)):
        total += parameter.numel()
        same = fixed.get(name)
        if same is None or same.dtype != parameter.dtype or same.shape != parameter.shape:
            continue
        if torch.equal(parameter.to(same.device), same):
            module, _, own = name.rpartition(".")
            setattr(teacher.get_submodule(module), own, same)
            shared += parameter.numel()
    return shared / total


def set_execution(model: Any, recipe: Recipe, device_type: str) -> None:
    """Let a loaded model, or a teacher, compute by the recipe's attention function, and compile its
    layers when they first run.

    Raises:
        RecipeError: the model can't use that function there.
    """
    if recipe.attention:
        try:
            if recipe.attention == "flex_attention" and device_type == "cpu":
                raise ValueError("it has no gradients on a CPU")
            model.set_attn_implementation(recipe.attention)
        except (ValueError, ImportError) as problem:
            raise RecipeError(
                f"attention is {recipe.attention}, which a {model.config.model_type} can't use "
                f"here ({first_line(problem)}): name another function, or remove attention"
            ) from None
    if recipe.compile:
        for layer in layers(model):
            layer.compile()


def place(model: Any, device: Any, *, shards: int, bf16: bool) -> Any:
    """Place a model on a device of this process: as one of some shards; or whole, and with the
    gradients of all processes if it is trained.
    """
    if shards > 1:
        return shard(model, device, bf16=bf16, shards=shards)
    model.to(device)
    if model.training and started() > 1:
        return replicate(model)
    return model


def check_apart(model: Any) -> None:
    """Refuse a model that reads across the beginning of a document, though positions start anew
    there. Every process calls this, with the placed model.

    Raises:
        RecipeError: another document before it changes what the model predicts in the next one.
    """
    positions = torch.arange(_TRIED, device=model.device).repeat(1, 2)
    found = []
    for token in (0, 1):
        ids = torch.zeros_like(positions)
        ids[:, :_TRIED] = token
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        found.append(logits[:, _TRIED:])
    reshard(model)
    rounding = _ROUNDING * torch.finfo(logits.dtype).eps
    if not torch.allclose(*found, rtol=rounding, atol=rounding):
        raise RecipeError(
            f"document_masks is true, and a {model.config.model_type} reads across the beginning "
            "of a document: remove document_masks, or name another function as attention"
        )


def recompute(model: Any) -> None:
    """Recompute the activations of every layer in the backward pass."""
    # in older transformers it has another name
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def turn_dropout_off(model: Any) -> None:
    """Set every dropout of a transformers model to 0: in modules, in the numbers that attention
    passes to its function, and in the config that modules may read. Uptraining continues
    pretraining, which T5 1.1 and most decoders did without dropout. The noise of routers
    (`jitter_noise`) is turned off too. The probability of dropping whole layers (`layerdrop`) is
    not changed.

    NLLB-MoE's experts are scaled by what training would drop of them, and its routers leave tokens
    out, in training alone. These modules therefore stay in evaluation mode: else what is trained
    would be another function than what is used.
    """
    evaluated = set()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if any(hasattr(module, name) for name in _OTHERWISE_IN_TRAINING):
            evaluated.add(module.eval())
            module.train = MethodType(_unchanged, module)
    for holder in (*set(model.modules()).difference(evaluated), model.config):
        for name, value in list(vars(holder).items()):
            named = "dropout" in name or "pdrop" in name or name == "jitter_noise"
            if named and isinstance(value, float) and "classifier" not in name:
                setattr(holder, name, 0.0)


def _unchanged(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of a module's `train`: its mode stays."""
    del mode
    return module


def modules_of_text(model: Any) -> set[nn.Module]:
    """The modules of a model that text passes; beside towers for images, the decoder and the output
    layer.

    Other parameters would get no gradient, which DDP takes for an error, and the optimizer would
    let them decay.
    """
    config = model.config
    if config.is_encoder_decoder or not is_composite({"model_type": config.model_type}):
        return set(model.modules())
    decoder = model.get_decoder()
    found = {*decoder.modules(), model.get_output_embeddings()}
    for layer in decoder.modules():
        if hasattr(layer, "cross_attn"):  # Mllama's layers that look at a picture
            found -= set(layer.modules())
    return found


def fix_towers(model: Any) -> None:
    """Exclude from training what text does not pass."""
    for module in set(model.modules()) - modules_of_text(model):
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)


# Adapters


def check_lora(lora: Lora | None, *, sharded: bool) -> None:
    """Refuse adapters that can't be trained, before anything is loaded.

    Args:
        lora: the settings; None is not refused.
        sharded: whether the model would be sharded.

    Raises:
        MissingExtraError: PEFT is not installed.
        LaunchError: quantised weights would be sharded.
    """
    if lora is None:
        return
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(
            "lora needs PEFT, which is not installed: pip install 'gqa-convert[lora]'"
        )
    if sharded and lora.quantize:
        raise LaunchError(
            f"lora.quantize is {lora.quantize}, and the launch or the recipe asks for FSDP, which "
            "can't shard such weights: remove quantize; or launch with "
            "recipes/accelerate/multi_gpu.yaml, or set sharding to replicate"
        )


def loading_options(recipe: Recipe, *, sharded: bool) -> dict[str, Any]:
    """How weights are loaded: in float32; or if they are fixed, in 4 bits, or in bfloat16 where
    they are not sharded. FSDP2 takes a layer's parameters of one type, and adapters have float32.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    lora = recipe.lora
    in_bf16 = lora and not sharded and recipe.precision == "bf16"
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    if not lora or not lora.quantize:
        return {"dtype": dtype}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            f"lora.quantize is {lora.quantize}, which needs bitsandbytes: "
            "pip install 'gqa-convert[qlora]', or remove quantize"
        )
    from transformers import BitsAndBytesConfig

    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"dtype": dtype, "quantization_config": in_4_bits}


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
    """The names of the modules that get an adapter: every linear layer that text passes, but the
    output layer.

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
