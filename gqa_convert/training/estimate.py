"""Estimates a run on a number of GPUs, without starting it: memory and hours.

The models of the recipe are made without numbers (torch's FakeTensorMode) and take one micro-batch forwards and
backwards, in which torch counts the operations and the bytes that autograd saves. So experts that are not active,
frozen weights, adapters and recomputed activations count as they do in the run. No weights are read. The estimate
leaves out the program itself, the memory of CUDA and NCCL, fragmentation and temporary buffers.
"""

import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.data.objectives import make_sampler
from gqa_convert.errors import GQAConvertError, OptionError, RecipeError
from gqa_convert.families.loading import model_of_config, no_bars
from gqa_convert.losses.distillation import positions_at_once
from gqa_convert.training.lora import check_lora, target_modules
from gqa_convert.training.models import recompute, turn_dropout_off
from gqa_convert.training.opening import sample_settings
from gqa_convert.training.recipe import Lora, Recipe
from gqa_convert.training.recipe_files import naming_conversion, read_recipe
from gqa_convert.training.sharding import layers, number_of_shards

_Shapes = Mapping[str, tuple[int, ...]]

UTILISATION = 0.35
"""The assumed share of a GPU's peak."""
_NF4 = 0.6
"""The bytes of a parameter in 4 bits with its scales, and the share of the embeddings, which stay in bfloat16."""
GPUS: dict[str, tuple[int, int]] = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
"""Dense bfloat16 teraflops and gigabytes of GPUs."""


class Hardware(NamedTuple):
    """The GPUs that a run is estimated for: their number, and of each the name, the memory in bytes and the peak in
    bfloat16 operations per second, as far as they are known.
    """

    gpus: int
    name: str | None = None
    memory: int | None = None
    peak: float | None = None


def named_gpus(gpus: int, name: str) -> Hardware:
    """A number of GPUs of the type that a user names, such as `h100`.

    Raises:
        OptionError: it is not known.
    """
    known = {each.lower().replace(" ", ""): each for each in GPUS}
    full_name = known.get(re.sub("[ _-]", "", name.lower()))
    if full_name is None:
        raise OptionError(
            f"--hardware names {name!r}, which is not known: name one of {', '.join(known)}, or the memory of a GPU (8x80GB), which estimates no hours"
        )
    teraflops, gigabytes = GPUS[full_name]
    return Hardware(gpus, full_name, gigabytes * 10**9, teraflops * 1e12)


def launched_gpus() -> int:
    """The number of processes that a launcher has started; 1 without a launcher."""
    stated = os.environ.get("WORLD_SIZE", "")
    return int(stated) if stated.isdecimal() and int(stated) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Result):
    """The estimate of a run.

    Attributes:
        model: as the recipe names it.
        gpus, gpu: how many GPUs of which type; None if the type is not known.
        shards: over how many of them each parameter is sharded.
        parameters: how many numbers are `trained`, in `all` of the model, and in the `teacher`.
        steps: of the whole run.
        samples_per_step: of all GPUs together.
        memory: bytes per GPU, by part.
        memory_needed, memory_of_gpu: bytes per GPU; None if what it has is not known.
        flops: floating-point operations of a step.
        hours: of the whole run, of arithmetic alone at `UTILISATION`; None if the type of the GPUs is not known.
        tokens_needed: tokens of text that the whole run reads.
    """

    model: str
    gpus: int
    gpu: str | None
    shards: int
    parameters: Mapping[str, int]
    steps: int
    samples_per_step: int
    memory: Mapping[str, int]
    memory_needed: int
    memory_of_gpu: int | None
    flops: int
    hours: float | None
    tokens_needed: int


def estimate(path: str | Path, overrides: Sequence[str], hardware: Hardware) -> Estimate:
    """Estimate the run of a recipe.

    Args:
        path: the path of the recipe.
        overrides: `key=value` pairs that replace values of the recipe.
        hardware: the GPUs to estimate for.

    Raises:
        RecipeError: the recipe is wrong, or its model can't be made without its numbers.
        LaunchError: weights in 4 bits would be sharded.
        DataError: the tokenizer lacks a token that the objective needs.
    """
    recipe = read_recipe(path, overrides)
    shards = number_of_shards(recipe.sharding, hardware.gpus)
    check_lora(recipe.lora, sharded=shards > 1)
    with no_bars(), naming_conversion(path, recipe.model):
        student = open_checkpoint(recipe.model, download=True)
        teacher = None if recipe.teacher is None else open_checkpoint(recipe.teacher)
        sampler = make_sampler(sample_settings(recipe, student))
    # texts of different lengths are taken to be as long as they may be
    tokens_per_sample = Fraction(sampler.raw_tokens)
    shapes = {name: (recipe.micro_batch_size, *shape) for name, shape in sampler.shapes().items()}
    try:
        memory, parameters, flops = _costs(recipe, student, teacher, shapes, shards)
    except GQAConvertError:
        raise
    except Exception as problem:  # whatever a class does with numbers that are not there
        first = str(problem).partition("\n")[0][:200]
        raise RecipeError(
            f"{recipe.model} (model type {student.config.get('model_type')!r}) can be trained, but not estimated: {type(problem).__name__}: {first}"
        ) from None
    samples_per_step, steps = recipe.samples_per_step(tokens_per_sample), recipe.steps(tokens_per_sample)
    flops = round(flops * samples_per_step / recipe.micro_batch_size)
    hours = None
    if hardware.peak is not None:
        hours = steps * flops / (hardware.gpus * hardware.peak * UTILISATION) / 3600
    return Estimate(
        model=recipe.model,
        gpus=hardware.gpus,
        gpu=hardware.name,
        shards=shards,
        parameters=parameters,
        steps=steps,
        samples_per_step=samples_per_step,
        memory=memory,
        memory_needed=sum(memory.values()),
        memory_of_gpu=hardware.memory,
        flops=flops,
        hours=hours,
        tokens_needed=int(steps * samples_per_step * tokens_per_sample),
    )


def _costs(
    recipe: Recipe, student: Checkpoint, teacher: Checkpoint | None, shapes: _Shapes, shards: int
) -> tuple[dict[str, int], dict[str, int], int]:
    """The bytes on each GPU by part; the numbers of parameters; and the operations for a micro-batch.

    Args:
        recipe: the recipe of the run.
        student, teacher: the checkpoints of the run.
        shapes: of the inputs of a micro-batch.
        shards: over how many GPUs each parameter is sharded.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    in_bf16, lora = recipe.precision == "bf16", recipe.lora
    size = 2 if in_bf16 else 4
    with FakeTensorMode():
        # FSDP2 computes in bfloat16 weights, and adapters are on such; otherwise autocasting does
        model = _outline(student, in_bf16 and (shards > 1 or lora is not None))
        if lora is not None:
            _add_adapters(model, lora)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        count, learning = _numbers(model.parameters()), _numbers(trained)
        blocks = [_numbers(layer.parameters()) for layer in layers(model)]
        flops, saved = _pass(model, shapes, in_bf16)
        positions = math.prod(shapes.get("decoder_input_ids") or shapes["input_ids"])
        logits = positions_at_once(positions) * model.get_output_embeddings().weight.shape[0]
        loss = logits * (size + 8)  # the logits, and distributions and gradients in float32 of a part
        if recipe.gradient_checkpointing:  # the inputs of all layers; then one layer at a time, without the logits
            one_layer = saved // max(1, len(blocks))
            recompute(model)
            flops, saved = _pass(model, shapes, in_bf16)
            saved += max(0, one_layer - loss)
        fixed_size = 4.0
        if lora is not None:
            fixed_size = _NF4 if lora.quantize else size
        memory = {
            "weights": (fixed_size * (count - learning) + 4 * learning) / shards,
            "gradients": 4 * learning / shards,
            "moments": 4 * sum(_moments(parameter, recipe) for parameter in trained) / shards,
            "activations": saved,
            "logits": loss,
        }
        if shards > 1:  # two layers, what is outside the layers, and the gradients of one layer and of that
            outside = count - sum(blocks)
            memory["gathered layers"] = size * (2 * max(blocks) + outside)
            if lora is None:
                memory["gathered layers"] += (size + 4) * (max(blocks) + outside)
        taught = 0
        if teacher is not None:
            model = _outline(teacher, in_bf16=True)
            taught = _numbers(model.parameters())
            with torch.no_grad():
                flops += _pass(model, shapes, in_bf16=False)[0]
            memory["teacher"] = 2 * taught / shards + 2 * logits
    rounded = {name: round(nbytes) for name, nbytes in memory.items() if nbytes}
    return rounded, {"trained": learning, "all": count, "teacher": taught}, flops


def _numbers(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _outline(checkpoint: Checkpoint, in_bf16: bool) -> Any:
    """A checkpoint's model without numbers, in training mode."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = checkpoint.folder
        if folder is None:  # on the Hub
            folder = Path(temporary)
            (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
        model = model_of_config(folder, torch.bfloat16 if in_bf16 else torch.float32)
        if any(".experts." in name for name, _ in model.named_parameters()):
            model = model_of_config(folder, torch.bfloat16)  # the only type in which torch knows their products' shapes
    turn_dropout_off(model)
    return model.train()


def _add_adapters(model: Any, lora: Lora) -> None:
    """Fix a model's parameters, and add products of adapters to its layers' outputs; PEFT needs numbers to do so."""
    model.requires_grad_(False)
    for name in target_modules(model):
        module = model.get_submodule(name)
        rows, columns = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
        module.adapter_down = nn.Parameter(torch.empty(lora.rank, columns))
        module.adapter_up = nn.Parameter(torch.empty(rows, lora.rank))
        module.register_forward_hook(_with_adapter)


def _with_adapter(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output + linear(linear(inputs[0].float(), module.adapter_down), module.adapter_up)


def _moments(parameter: Tensor, recipe: Recipe) -> int:
    """How many numbers the moments of a parameter have."""
    count: int = parameter.numel()
    if recipe.optimizer == "adamw":
        return 2 * count
    if parameter.ndim < 2:
        return count
    return count // int(parameter.shape[-1]) + count // int(parameter.shape[-2])


def _pass(model: Any, shapes: _Shapes, in_bf16: bool) -> tuple[int, int]:
    """The operations of a micro-batch, forwards and (if gradients are enabled) backwards, and the bytes that the forward
    pass saves.
    """
    from torch.utils.flop_counter import FlopCounterMode

    inputs = {}
    for name, shape in shapes.items():
        inputs[name] = torch.zeros(shape, dtype=torch.long if "ids" in name else next(model.parameters()).dtype)
    fixed = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, Any] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in fixed:
            saved[storage._cdata] = storage
        return tensor

    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        saving = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with saving, torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            logits = model(**inputs, use_cache=False).logits
        if logits.requires_grad:
            logits.sum().backward()
    return counter.get_total_flops(), sum(storage.nbytes() for storage in saved.values())


_UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * math.prod(q) * k[-2],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: (
        8 * math.prod(q) * k[-2]
    ),
    torch.ops.aten._grouped_mm: lambda left, right, *_, **__: 2 * math.prod(left) * right[-1],
}
"""Operations that torch's counter leaves out, from the shapes of their arguments: attention on CPUs, all pairs of
positions, and the products of experts.
"""
