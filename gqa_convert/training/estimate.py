"""Estimates a run on a number of GPUs, without starting it: memory and hours.

The models of the recipe are made without numbers (torch's FakeTensorMode) and take one micro-batch
forwards and backwards, in which torch counts the operations and the bytes that autograd saves. So
experts that are not active and frozen weights count as they do in the run. No weights are read. The
estimate leaves out the program itself, the memory of CUDA and NCCL, fragmentation and temporary
buffers.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint, open_local
from gqa_convert.data.encoders import LAST
from gqa_convert.data.objectives import make_sampler
from gqa_convert.data.sampler import Batch, Sampler
from gqa_convert.data.token_files import TokenSource
from gqa_convert.errors import GQAConvertError, OptionError, RecipeError, first_line
from gqa_convert.families.loading import model_of_config, quiet, untie
from gqa_convert.losses.distillation import positions_at_once
from gqa_convert.publishing.atomic_files import write_json
from gqa_convert.runtime.json_objects import Result
from gqa_convert.runtime.speed import GPUS
from gqa_convert.sharding import layers, number_of_shards

from .models import check_lora, fix_towers, recompute, target_modules, turn_dropout_off
from .opening import sample_settings
from .optimizers import OPTIMIZERS
from .recipe import Recipe, read_recipe

OF_MACHINE = 8
"""The assumed number of GPUs of a machine."""
UTILISATION = 0.35
"""The assumed share of a GPU's peak."""
_NF4 = 0.6
"""The bytes of a parameter in 4 bits with its scales, and the share of the embeddings, which stay
in bfloat16.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Result):
    """The estimate of a run.

    Attributes:
        model: as the recipe names it.
        gpus, gpu: how many GPUs of which type.
        shards: over how many of them each parameter is sharded.
        parameters: how many numbers are `trained`, in `all` of the model, and in the `teacher`.
        steps: of the whole run.
        samples_per_step: of all GPUs together.
        memory: bytes per GPU, by part.
        memory_needed, memory_of_gpu: bytes per GPU.
        flops: floating-point operations of a step.
        hours: of the whole run, of arithmetic alone at `UTILISATION`.
        tokens_needed: tokens of text that the whole run reads.
    """

    model: str
    gpus: int
    gpu: str
    shards: int
    parameters: Mapping[str, int]
    steps: int
    samples_per_step: int
    memory: Mapping[str, int]
    memory_needed: int
    memory_of_gpu: int
    flops: int
    hours: float
    tokens_needed: int


def estimate(path: str | Path, overrides: Sequence[str], gpus: int, gpu: str) -> Estimate:
    """Estimate the run of a recipe.

    Args:
        path: the path of the recipe.
        overrides: `key=value` pairs that replace values of the recipe.
        gpus, gpu: the number and the type of the GPUs to estimate for, such as `h100`.

    Raises:
        OptionError: the type is not known.
        RecipeError: the recipe is wrong, or its model can't be made without its numbers.
        LaunchError: adapters would be sharded, or machines have unequally many GPUs.
        DataError: the tokenizer lacks a token that the objective needs.
    """
    known = {name.lower().replace(" ", ""): name for name in GPUS}
    name = known.get(re.sub("[ _-]", "", gpu.lower()))
    if name is None:
        raise OptionError(
            f"--hardware names {gpu!r}, which is not known: name one of {', '.join(known)}"
        )
    teraflops, gigabytes = GPUS[name]
    recipe = read_recipe(path, overrides)
    shards = number_of_shards(recipe.sharding, gpus, OF_MACHINE)
    check_lora(recipe.lora, sharded=shards > 1)
    with quiet():
        student = open_local(recipe.model)
        teacher = open_checkpoint(recipe.teacher) if recipe.teacher else None
        sampler = make_sampler(sample_settings(recipe, student))
    # texts of different lengths are taken to be as long as they may be
    tokens_per_sample = sampler.raw_tokens
    batch = _longest(sampler, recipe.micro_batch_size)
    try:
        memory, parameters, flops = _costs(recipe, student, teacher, batch, shards)
    except GQAConvertError:
        raise
    except Exception as problem:  # whatever a class does with numbers that are not there
        raise RecipeError(
            f"{recipe.model} (model type {student.config.get('model_type')!r}) can be trained, "
            f"but not estimated: {first_line(problem)}"
        ) from None
    samples = recipe.samples_per_step(tokens_per_sample)
    steps = recipe.steps(tokens_per_sample)
    flops = round(flops * samples / recipe.micro_batch_size)
    return Estimate(
        model=recipe.model,
        gpus=gpus,
        gpu=name,
        shards=shards,
        parameters=parameters,
        steps=steps,
        samples_per_step=samples,
        memory=memory,
        memory_needed=sum(memory.values()),
        memory_of_gpu=gigabytes * 10**9,
        flops=flops,
        hours=steps * flops / (gpus * teraflops * 1e12 * UTILISATION) / 3600,
        tokens_needed=int(steps * samples * tokens_per_sample),
    )


def _longest(sampler: Sampler, size: int) -> Batch:
    """A batch of the longest sample, from two documents of made-up tokens."""
    length = sampler.settings.length
    tokens = np.zeros(2 * length, np.uint32)
    tokens[length - 1 :: length] |= LAST
    source = TokenSource(tokens)
    place = sampler.first(source, source.size)[0]
    return sampler.batch([(source, place)] * size, [(0, 0)] * size)


def _costs(
    recipe: Recipe, student: Checkpoint, teacher: Checkpoint | None, batch: Batch, shards: int
) -> tuple[dict[str, int], dict[str, int], int]:
    """The bytes on each GPU by part; the numbers of parameters; and the operations for a
    micro-batch.

    Args:
        recipe: the recipe of the run.
        student, teacher: the checkpoints of the run.
        batch: a micro-batch, of which only the shapes count.
        shards: over how many GPUs each parameter is sharded.
    """
    lora = recipe.lora
    in_bf16 = recipe.precision == "bf16"
    size = 2 if in_bf16 else 4
    with FakeTensorMode():
        # FSDP2 computes in bfloat16 weights, and adapters are on such; otherwise autocasting does
        model = _outline(student, in_bf16 and (shards > 1 or bool(lora)))
        count = _numbers(model.parameters())
        learning = _numbers(each for each in model.parameters() if each.requires_grad)
        fixed = 4 * (count - learning) / shards
        copied = 0
        if lora:  # PEFT can't add adapters without numbers
            fixed = count * (4 / shards if shards > 1 else _NF4 if lora.quantize else size)
            adapted = [model.get_submodule(name).weight.shape for name in target_modules(model)]
            learning = lora.rank * sum(map(sum, adapted))
            count += learning
            # bytes of the adapters' inputs at a position
            copied = size * sum(columns for _, columns in adapted)
            # gradients pass all layers, as those of adapters do
            model.requires_grad_(False)
            model.get_input_embeddings().requires_grad_(True)
        blocks = [_numbers(layer.parameters()) for layer in layers(model)]
        shapes = {name: each.shape for name, each in model.named_parameters()}
        flops, saved = _pass(model, batch, in_bf16)
        positions = batch["labels"].size
        saved += copied * positions
        if recipe.gradient_checkpointing:  # the inputs of all layers; then one layer at a time
            one_layer = saved // max(1, len(blocks))
            recompute(model)
            flops, saved = _pass(model, batch, in_bf16)
            saved += one_layer
        # the logits of some positions at once, and their distributions and gradients in float32
        vocabulary = model.get_output_embeddings().weight.shape[0]
        logits = vocabulary * positions_at_once(positions)
        trained = 4 * learning / shards
        memory = {
            "weights": fixed + trained,
            "gradients": trained,
            "moments": OPTIMIZERS[recipe.optimizer].numbers * trained,
            "activations": saved,
            "logits": logits * (size + 8),
        }
        if shards > 1:
            # two layers and what is outside, and of one layer and of that the gradients
            largest = max(blocks)
            outside = _numbers(model.parameters()) - sum(blocks)
            graded = learning / len(blocks) if lora else largest + outside
            memory["gathered layers"] = size * (2 * largest + outside) + (size + 4) * graded
        taught = 0
        if teacher:
            model = _outline(teacher, in_bf16=True)
            taught = own = _numbers(model.parameters())
            if lora and not lora.quantize and in_bf16 and shards == 1:
                own = _own_numbers(model, shapes)
            with torch.no_grad():
                flops += _pass(model, batch, in_bf16=False)[0]
            memory["teacher"] = 2 * own / shards + 2 * logits
    rounded = {name: round(nbytes) for name, nbytes in memory.items()}
    return rounded, {"trained": learning, "all": count, "teacher": taught}, flops


def _numbers(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _own_numbers(teacher: nn.Module, shapes: Mapping[str, Sequence[int]]) -> int:
    """The numbers of a teacher that a student with adapters does not have too: those of attention
    modules whose heads were merged.

    Args:
        teacher: the student's source.
        shapes: of the student's parameters.
    """
    numbers: dict[str, int] = defaultdict(int)
    merged = set()
    for name, parameter in teacher.named_parameters():
        module = name.rsplit(".", 2)[0]
        numbers[module] += parameter.numel()
        if shapes.get(name) != parameter.shape:
            merged.add(module)
    return sum(numbers[module] for module in merged)


def _outline(checkpoint: Checkpoint, in_bf16: bool) -> Any:
    """A checkpoint's model without numbers, in training mode."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)  # a checkpoint on the Hub has none
        write_json(folder / "config.json", checkpoint.config)
        model = model_of_config(folder, torch.bfloat16 if in_bf16 else torch.float32)
        if any(".experts." in name for name, _ in model.named_parameters()):
            # the only type in which torch knows the shapes of their products
            model = model_of_config(folder, torch.bfloat16)
    # an output layer that is stored is one of its own, whatever config.json says of the embeddings
    output = model.get_output_embeddings()
    weight = next(f"{name}.weight" for name, each in model.named_modules() if each is output)
    if any(stored.endswith(weight) for stored in checkpoint.entries):
        untie(model, weight)
    turn_dropout_off(model)
    fix_towers(model)
    return model.train()


def _pass(model: nn.Module, batch: Batch, in_bf16: bool) -> tuple[int, int]:
    """The operations of a micro-batch, forwards and (if gradients are enabled) backwards, and the
    bytes that the forward pass saves.
    """
    names = batch.keys() - {"labels", "position_ids"}
    inputs = {name: torch.zeros(batch[name].shape, dtype=torch.long) for name in names}
    fixed = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in fixed:
            saved[storage._cdata] = storage
        return tensor

    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        saving = torch.autograd.graph.saved_tensors_hooks(save, lambda kept: kept)
        with saving, torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            logits = model(**inputs, use_cache=False).logits
        if logits.requires_grad:
            logits.sum().backward()
    return counter.get_total_flops(), sum(each.nbytes() for each in saved.values())


def _attention(q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    """The operations of attention forwards: all pairs of positions, for the scores and the sums."""
    return 4 * prod(q) * k[-2]


def _attention_backward(_: Any, q: Sequence[int], k: Sequence[int], *__: Any, **___: Any) -> int:
    return 2 * _attention(q, k)


def _experts(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(left) * right[-1]


_UNCOUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _experts,
}
"""Operations that torch's counter leaves out, from the shapes of their arguments: attention on CPUs
and the products of experts.
"""
