"""Loads the models of a run and places them on devices; the student may be replicated or sharded."""

from pathlib import Path
from typing import Any

import torch

from gqa_convert.data.samples import Samples
from gqa_convert.families.loading import check_complete
from gqa_convert.losses.output_layer import remove_output_layer
from gqa_convert.training import memory, sharding
from gqa_convert.training.documents import check_apart
from gqa_convert.training.lora import add_adapters, loading_options
from gqa_convert.training.masks import model_inputs
from gqa_convert.training.opening import NEEDS_HEAD, Opened, explained
from gqa_convert.training.optimizers import build_optimizer, choose_trained
from gqa_convert.training.recipe import Recipe
from gqa_convert.training.run_context import RunContext
from gqa_convert.training.teacher import load_teacher, round_teacher, rounds_teacher

_MOST_ROUNDING = 0.01
"""Nats per token by which a rounded teacher may differ before float32 is recommended; a fitted student that needs
uptraining differs by a multiple of it.
"""
_TRIED = 8
"""Tokens on which models are tried."""


class RunModels:
    """The models of a run; the student is loaded at once.

    Args:
        context: the run.
        opened: the models' facts.

    Attributes:
        inner: the student as transformers made it.
        student: `inner`, or its wrapper for several processes.
        optimizer: of the student.
    """

    def __init__(self, context: RunContext, opened: Opened) -> None:
        self._context, self._opened = context, opened
        recipe, layout = context.recipe, context.layout
        with context.together():
            self.inner = load_student(recipe, opened.student_folder, layout)
        self.student = place_student(self.inner, context.accelerator, layout, bf16=recipe.precision == "bf16")
        self._check_apart(recipe.model, self.inner)
        self.optimizer = build_optimizer(self.inner, recipe)

    def load_teacher(self, samples: Samples) -> Any:
        """Load the teacher, if the recipe names one. From now on, student and teacher return states in place of logits
        where this is possible.
        """
        recipe, layout, teacher = self._context.recipe, self._context.layout, None
        if self._opened.teacher_folder is not None:
            assert self._opened.teacher is not None
            dtype, device = recipe.teacher_dtype, self._context.accelerator.device
            rounds = rounds_teacher(dtype, memory.bytes_each(self._opened.teacher), device.type)
            if rounds and layout.sharded:
                dtype = "bf16"
            teacher = self._load(self._opened.teacher_folder, str(recipe.teacher), dtype)
            if rounds and not layout.sharded:
                self._round_teacher(teacher, samples)
        if self._remove_output(recipe.model, self.inner) and teacher is not None:
            self._remove_output(str(recipe.teacher), teacher)
        return teacher

    def load_source(self, folder: Path) -> Any:
        """Load the checkpoint that the student was converted from, to measure its loss."""
        model = self._load(folder, str(folder), "auto")
        self._remove_output(str(folder), model)
        return model

    def _load(self, folder: Path, name: str, dtype: str) -> Any:
        context = self._context
        with context.together(), explained(name):
            model = load_teacher(folder, dtype, "cpu", by_first=context.layout.sharded)
        if context.layout.sharded:
            model = sharding.shard(model, context.accelerator.device, context.layout, bf16=False)
        else:
            model = model.to(context.accelerator.device)
        self._check_apart(name, model)
        return model

    def _round_teacher(self, teacher: Any, samples: Samples) -> None:
        """Convert the teacher to bfloat16, and report what that changes on the first samples."""
        context = self._context
        with context.together():
            batch = samples.batch(range(context.recipe.micro_batch_size))
            device = context.accelerator.device
            tensors = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
            labels = tensors.pop("labels")
            divergence = round_teacher(teacher, model_inputs(teacher, tensors), labels)
        advice = ": set teacher_dtype to float32 to keep it exact" if divergence > _MOST_ROUNDING else ""
        context.say(
            f"the teacher runs in bfloat16, with a KL of {divergence:.2g} nats per token from its float32{advice}"
        )

    def _remove_output(self, name: str, model: Any) -> bool:
        """Take the output layer out of a model, so that no batch's logits are held as a whole; returns whether that was
        possible.
        """
        with self._context.together():
            removed = remove_output_layer(model, _trial(model))
        sharding.reshard(model)
        if not removed:
            self._context.say(f"{name} makes the logits of a batch at once: expect more memory than was estimated")
        return removed

    def _check_apart(self, name: str, model: Any) -> None:
        """If `document_mask` is set, refuse a model in which documents in one row affect each other."""
        if self._context.recipe.document_mask:
            with self._context.together():
                check_apart(name, model)
            sharding.reshard(model)


def load_student(recipe: Recipe, folder: Path, layout: sharding.Layout) -> Any:
    """The model to train, in float32 on the CPU, with the recipe's dropout and trained parameters; or with adapters, the
    only trained parameters, on weights in the type that `lora.loading_options` states.

    Raises:
        CorruptCheckpointError: transformers can't load it, or it lacks parameters.
        NoLanguageModelError: the model was saved without its language-model head.
    """
    with explained(recipe.model):
        options = {"dtype": torch.float32} if recipe.lora is None else loading_options(recipe)
        model, missing = sharding.load(folder, **options, by_first=layout.sharded)
    check_complete(recipe.model, folder, model, missing, NEEDS_HEAD)
    if recipe.gradient_checkpointing:
        recompute(model)
    set_dropout(model, recipe.dropout)
    if recipe.lora is None:
        choose_trained(model, recipe.trainable)
    else:
        add_adapters(model, recipe.lora)
    return model.train()


def place_student(model: Any, accelerator: Any, layout: sharding.Layout, *, bf16: bool) -> Any:
    """Place the student on the device of this process: whole for a single process, otherwise replicated or sharded."""
    if layout.sharded:
        return sharding.shard(model, accelerator.device, layout, bf16=bf16)
    if layout.processes == 1:
        return model.to(accelerator.device)
    return sharding.replicate(model, accelerator.device)


def recompute(model: Any) -> None:
    """Recompute the activations of every layer in the backward pass."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # older transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def set_dropout(model: Any, probability: float) -> None:
    """Set every dropout of a transformers model: in modules, in the numbers that attention passes to its function, and
    in the config that modules may read.

    The probability of dropping whole layers (`layerdrop`) is not changed.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = probability
        for name, value in vars(module).items():
            if _is_dropout(name, value):
                setattr(module, name, probability)
    for name, value in model.config.to_dict().items():
        if _is_dropout(name, value):
            setattr(model.config, name, probability)


def _is_dropout(name: str, value: object) -> bool:
    named = "dropout" in name or "pdrop" in name
    other = "classifier" in name or "layerdrop" in name
    return isinstance(value, float) and named and not other


def _trial(model: Any) -> dict[str, torch.Tensor]:
    """Inputs on which any model runs."""
    ids = torch.arange(_TRIED, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
