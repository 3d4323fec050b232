"""The models of a run on this process: the student with its optimizer, and models that are not trained."""

from pathlib import Path
from typing import Any

import torch

from gqa_convert.text.output_layers import remove_output_layer
from gqa_convert.text.samples import Samples
from gqa_convert.training import memory, sharding
from gqa_convert.training.documents import keep_apart
from gqa_convert.training.masks import model_inputs
from gqa_convert.training.models import load_student, place_fixed, place_student
from gqa_convert.training.opening import Opened, explained
from gqa_convert.training.optimizers import build_optimizer
from gqa_convert.training.run_context import RunContext
from gqa_convert.training.state import StateDict, set_state, state_of
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
        """Load the teacher, if the recipe names one. From now on, student and teacher are compiled with `compile`, and
        return states in place of logits where this is possible.
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
        if recipe.compile:
            self.student.compile()
            if teacher is not None:
                teacher.compile()
        return teacher

    def load_fixed(self, folder: Path, name: str, dtype: str) -> Any:
        """Load a model that is not trained and returns states in place of logits where this is possible."""
        model = self._load(folder, name, dtype)
        self._remove_output(name, model)
        return model

    def _load(self, folder: Path, name: str, dtype: str) -> Any:
        context = self._context
        with context.together(), explained(name):
            model = load_teacher(folder, dtype, "cpu", by_first=context.layout.sharded)
        model = place_fixed(model, context.accelerator, context.layout)
        self._check_apart(name, model)
        return model

    def state(self) -> StateDict:
        """The state that checkpoints hold: of the adapters, or of the whole student, and of the optimizer."""
        return state_of(self.student, self.optimizer, trained_only=self._context.adapters_only)

    def set_state(self, state: StateDict) -> None:
        """Continue from a state."""
        set_state(self.student, self.optimizer, state, trained_only=self._context.adapters_only)

    def _round_teacher(self, teacher: Any, samples: Samples) -> None:
        """Convert the teacher to bfloat16, and report what that changes on the first samples."""
        context = self._context
        with context.together():
            tensors = {
                name: torch.from_numpy(array).to(context.accelerator.device)
                for name, array in samples.batch(range(context.recipe.micro_batch_size)).items()
            }
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
        recipe, layout = self._context.recipe, self._context.layout
        if recipe.document_mask:
            autocast = model is self.inner and recipe.precision == "bf16" and not layout.sharded
            with self._context.together():
                note = keep_apart(name, model, recipe.dropout, autocast=autocast)
            if note is not None:
                self._context.say(note)
            sharding.reshard(model)


def _trial(model: Any) -> dict[str, torch.Tensor]:
    """Inputs on which any model runs."""
    ids = torch.arange(_TRIED, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
