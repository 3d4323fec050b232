"""Estimates a run on a number of GPUs, without starting it: memory and hours.

Everything follows from the recipe, the configs and the headers of the weight files. Nothing is loaded, tokenised or
written.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path

from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.data.objectives import OBJECTIVES, SampleSettings
from gqa_convert.errors import RecipeError
from gqa_convert.families.loading import no_bars
from gqa_convert.training import memory
from gqa_convert.training.architecture import Architecture, read_architecture
from gqa_convert.training.flops import Flops, sample_flops
from gqa_convert.training.gpus import Gpu
from gqa_convert.training.recipe import check_lora, read_recipe
from gqa_convert.training.sharding import layout_of
from gqa_convert.training.tokenizing import text_settings
from gqa_convert.training.uptrain import naming_conversion

UTILISATION = 0.35
"""The share of the peak that is assumed unless another one is stated."""
_MACHINE = 8
"""GPUs of a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The GPUs that a run is estimated for.

    Attributes:
        gpus: their number.
        gpu: their type, if it is known.
        memory: the bytes of each, if they are known.
        utilisation: the share of the peak that the arithmetic of a step reaches.
    """

    gpus: int
    gpu: Gpu | None = None
    memory: int | None = None
    utilisation: float = UTILISATION

    def hours(self, flops: int) -> float | None:
        """The hours that so many floating-point operations take; None if the peak of the GPUs is not known."""
        return None if self.gpu is None else flops / (self.gpus * self.gpu.peak * self.utilisation) / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(Result):
    """The estimate of a run.

    Attributes:
        model, teacher: as the recipe names them.
        gpus, gpu: how many GPUs of which type; None if the type is not known.
        shards: over how many of them each parameter is sharded.
        parameters: how many numbers are `trained`, in `all` of the model, and in the `teacher`.
        steps: of the whole run.
        samples_per_step, tokens_per_step: of all GPUs together; the tokens are those of text.
        micro_batches: forward passes of each GPU in a step.
        memory: bytes per GPU, by part.
        memory_of_gpu: the bytes that a GPU has, if they are known.
        flops: floating-point operations of a step.
        utilisation: the assumed share of the peak.
        hours: of the whole run, of arithmetic alone; None if the type of the GPUs is not known.
        tokens_needed: tokens of text that the whole run reads.
    """

    model: str
    teacher: str | None
    gpus: int
    gpu: str | None
    shards: int
    parameters: Mapping[str, int]
    steps: int
    samples_per_step: int
    tokens_per_step: float
    micro_batches: int
    memory: Mapping[str, int]
    memory_of_gpu: int | None
    flops: Flops
    utilisation: float
    hours: float | None
    tokens_needed: int

    @property
    def memory_needed(self) -> int:
        """Bytes per GPU."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """Whether the memory suffices; None if that of the GPUs is not known."""
        return None if self.memory_of_gpu is None else self.memory_needed <= self.memory_of_gpu

    def as_json(self) -> dict[str, object]:
        """The estimate as plain data, with what follows from it."""
        stated = Result.as_json(self) | {"memory_needed": self.memory_needed, "fits": self.fits}
        stated["flops"]["total"] = self.flops.total
        return stated


def dry_run(path: str | Path, overrides: Sequence[str], hardware: Hardware) -> DryRun:
    """Estimate the run of a recipe.

    Args:
        path: the path of the recipe.
        overrides: `key=value` pairs that replace values of the recipe.
        hardware: the GPUs to estimate for.

    Raises:
        RecipeError: the recipe is wrong, or the sizes of its model are not known.
        LaunchError: the GPUs can't be divided into groups of the recipe's `shard_size`.
        DataError: the tokenizer lacks a token that the objective needs.
    """
    recipe = read_recipe(path, list(overrides))
    machine = min(_MACHINE, hardware.gpus)
    layout = layout_of(recipe.sharding, recipe.shard_size, hardware.gpus, machine)
    check_lora(recipe.lora, sharded=layout.sharded, installed=False)
    with no_bars(), naming_conversion(path, recipe.model):
        settings = text_settings(recipe)
        objective = settings.pop("objective")
        length = settings.pop("sequence_length")
        tokens_per_sample = _tokens_per_sample(objective, SampleSettings(length=length, **settings))
        student = open_checkpoint(recipe.model)
        teacher = None if recipe.teacher is None else open_checkpoint(recipe.teacher)
    architecture = _sizes(recipe.model, student)
    setting = memory.setting_of(
        recipe,
        **memory.parameters_of(student, teacher, recipe, "cuda"),
        sequence_length=length,
        target_length=OBJECTIVES[objective].target_length(length),
        shards=layout.shards,
        device="cuda",
    )
    taught = None if teacher is None else _sizes(str(recipe.teacher), teacher)
    per_step, steps = recipe.samples_per_step(tokens_per_sample), recipe.steps(tokens_per_sample)
    flops = sample_flops(architecture, setting, taught).times(per_step)
    needed = int(steps * per_step * tokens_per_sample)
    micro_batches = ceil(ceil(per_step / hardware.gpus) / recipe.micro_batch_size)
    return DryRun(
        model=recipe.model,
        teacher=recipe.teacher,
        gpus=hardware.gpus,
        gpu=None if hardware.gpu is None else hardware.gpu.name,
        shards=layout.shards,
        parameters={"trained": setting.trained, "all": setting.parameters, "teacher": setting.teacher_parameters},
        steps=steps,
        samples_per_step=per_step,
        tokens_per_step=float(per_step * tokens_per_sample),
        micro_batches=micro_batches,
        memory=memory.plan(architecture, setting),
        memory_of_gpu=hardware.memory or (None if hardware.gpu is None else hardware.gpu.memory),
        flops=flops,
        utilisation=hardware.utilisation,
        hours=hardware.hours(steps * flops.total),
        tokens_needed=needed,
    )


def launched_gpus() -> int:
    """The number of processes that a launcher has started; 1 without a launcher."""
    stated = os.environ.get("WORLD_SIZE", "")
    return int(stated) if stated.isdigit() and int(stated) else 1


def _sizes(name: str, checkpoint: Checkpoint) -> Architecture:
    found = read_architecture(checkpoint.config)
    if found is None:
        raise RecipeError(
            f"the sizes of {name} (model type {checkpoint.config.get('model_type')!r}) are not known: it can be trained, but not estimated"
        )
    return found


def _tokens_per_sample(objective: str, settings: SampleSettings) -> int | Fraction:
    """The tokens of text in a sample. The texts of pairs are taken to be as long as they may be."""
    sampler = OBJECTIVES[objective].sampler
    return 2 * settings.length if sampler is None else sampler(settings).raw_tokens
