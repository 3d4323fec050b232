"""A recipe from plain data: every key read and checked, by itself and beside the others."""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gqa_convert.errors import RecipeError
from gqa_convert.training.recipe import readers
from gqa_convert.training.recipe.pairs import check_pairs
from gqa_convert.training.recipe.schema import (
    TRACKERS,
    DataSource,
    Objective,
    OptimizerName,
    Precision,
    Recipe,
    Schedule,
    TeacherDtype,
    Trainable,
)


def _trackers(key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise RecipeError(f"{key} is {readers.shown(value)}: it must be a list such as [tensorboard]")
    for name in names:
        if name not in TRACKERS:
            raise RecipeError(f"{key} names {readers.shown(name)}: the trackers are {', '.join(TRACKERS)}")
    if len({*names}) < len(names):
        raise RecipeError(f"{key} names a tracker twice: {readers.shown(names)}; name each once")
    return tuple(names)


_SOURCE_KEYS: dict[str, readers.Reader] = {
    "source": readers.place,
    "weight": readers.real(above=0),
    "text_field": readers.text,
    "split": readers.text,
    "name": readers.or_none(readers.text),
    "revision": readers.or_none(readers.text),
    "source_field": readers.or_none(readers.text),
    "target_field": readers.or_none(readers.text),
    "source_language": readers.or_none(readers.text),
    "target_language": readers.or_none(readers.text),
}


def _sources(key: str, value: Any) -> tuple[DataSource, ...]:
    """A string, a mapping, or a list of both."""
    items = value if isinstance(value, list | tuple) else [value]
    if not items:
        raise RecipeError(f"{key} is an empty list: name at least one file, glob or Hub data set")
    return tuple(
        _source(f"{key}[{index}]" if isinstance(value, list | tuple) else key, item) for index, item in enumerate(items)
    )


def _source(key: str, item: Any) -> DataSource:
    if isinstance(item, DataSource):
        item = dataclasses.asdict(item)
    if not isinstance(item, Mapping):
        return DataSource(readers.place(key, item))
    for name in item:
        if name not in _SOURCE_KEYS:
            raise RecipeError(f"{key} has an unknown key {_quoted(name)}: {instead(name, _SOURCE_KEYS)}")
    if "source" not in item:
        raise RecipeError(f"{key} has no key 'source': name a file, a glob or a Hub data set")
    return DataSource(**{name: _SOURCE_KEYS[name](f"{key}.{name}", value) for name, value in item.items()})


_tokens = readers.whole(units=True)
KEYS: dict[str, readers.Reader] = {
    "model": readers.place,
    "output": readers.place,
    "data": _sources,
    "objective": readers.choice(Objective),
    "sequence_length": readers.or_none(readers.whole(least=2, most=2**24, units=True)),
    "micro_batch_size": readers.whole(most=2**20),
    "tokens": readers.or_none(_tokens),
    "alpha": readers.or_none(readers.real(above=0, most=1)),
    "pretraining_tokens": readers.or_none(_tokens),
    "tokens_per_step": _tokens,
    "learning_rate": readers.real(above=0, most=1),
    "warmup_steps": readers.or_none(readers.whole(least=0)),
    "schedule": readers.choice(Schedule),
    "final_learning_rate": readers.real(least=0, most=1),
    "decay_share": readers.real(above=0, most=1),
    "optimizer": readers.choice(OptimizerName),
    "weight_decay": readers.real(least=0, most=10),
    "beta1": readers.real(least=0, below=1),
    "beta2": readers.real(least=0, below=1),
    "gradient_clipping": readers.or_none(readers.real(above=0)),
    "precision": readers.choice(Precision),
    "gradient_checkpointing": readers.boolean,
    "trainable": readers.choice(Trainable),
    "dropout": readers.real(least=0, below=1),
    "seed": readers.whole(least=0, most=2**32 - 1),
    "save_every": readers.whole(),
    "keep_checkpoints": readers.whole(),
    "evaluate_every": readers.or_none(readers.whole()),
    "evaluation_data": readers.or_none(_sources),
    "evaluation_tokens": _tokens,
    "teacher": readers.or_none(readers.place),
    "distillation_weight": readers.or_none(readers.real(least=0, most=1)),
    "temperature": readers.real(above=0, most=1000),
    "teacher_top_k": readers.or_none(readers.whole()),
    "teacher_dtype": readers.choice(TeacherDtype),
    "attention_matching": readers.real(least=0),
    "document_mask": readers.boolean,
    "trackers": _trackers,
    "compile": readers.boolean,
    "log_every": readers.whole(),
}
"""The reader of each key, in the order of Recipe's fields."""

# What other programs call these things.
_OTHER_NAMES = {
    "lr": "learning_rate",
    "batch_size": "tokens_per_step",
    "gradient_accumulation_steps": "tokens_per_step",
    "dataset": "data",
    "datasets": "data",
    "max_steps": "tokens",
    "steps": "tokens",
    "num_train_epochs": "tokens",
    "epochs": "tokens",
    "output_dir": "output",
    "out": "output",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "block_size": "sequence_length",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler_type": "schedule",
    "warmup": "warmup_steps",
    "mixed_precision": "precision",
    "report_to": "trackers",
    "source": "model",
    "save_total_limit": "keep_checkpoints",
    "path": "source",
    "dataset_config": "name",
    "subset": "name",
    "column": "text_field",
    "src_lang": "source_language",
    "tgt_lang": "target_language",
    "source_column": "source_field",
    "target_column": "target_field",
    "input_field": "source_field",
    "label_field": "target_field",
}


def _quoted(name: object) -> str:
    return repr(name) if isinstance(name, str) else readers.shown(name)


def instead(name: object, known: Iterable[str]) -> str:
    """Advice on an unknown key."""
    names = list(known)
    if isinstance(name, str):
        bare = name.lower().strip().lstrip("-").replace("-", "_")
        near = difflib.get_close_matches(bare, names, 1)
        other = _OTHER_NAMES.get(bare)
        if other in names:
            return f"did you mean {other!r}?"
        if near:
            return f"did you mean {near[0]!r}?"
    return f"the keys are {', '.join(names)}"


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """A recipe from plain data, such as `Recipe.resolved()` gives.

    Raises:
        RecipeError: a key is unknown, missing, malformed, or contradicts another.
    """
    for key in values:
        if key not in KEYS:
            raise RecipeError(f"unknown key {_quoted(key)}: {instead(key, KEYS)}")
    for key, meaning in (
        ("model", "the converted checkpoint"),
        ("output", "a folder for the run"),
        ("data", "the training text"),
    ):
        if key not in values:
            raise RecipeError(f"the recipe has no key {key!r}: give {meaning}")
    recipe = Recipe(**{key: KEYS[key](key, value) for key, value in values.items()})
    if recipe.teacher is not None and recipe.distillation_weight is None:
        recipe = dataclasses.replace(recipe, distillation_weight=1.0)
    _check_budget(recipe)
    _check_folders(recipe)
    _check_teacher(recipe)
    check_pairs(recipe)
    if recipe.document_mask and recipe.objective not in ("auto", "causal"):
        raise RecipeError(
            f"document_mask belongs to the causal objective, and objective is {recipe.objective}: remove one of them"
        )
    if recipe.evaluate_every is not None and recipe.evaluation_data is None:
        raise RecipeError(
            f"evaluate_every is {recipe.evaluate_every} and there is no evaluation_data: name text to evaluate on"
        )
    return recipe


def _check_budget(recipe: Recipe) -> None:
    if recipe.tokens is not None and (recipe.alpha is not None or recipe.pretraining_tokens is not None):
        second = "alpha" if recipe.alpha is not None else "pretraining_tokens"
        raise RecipeError(f"tokens and {second} both state the budget: keep tokens, or alpha with pretraining_tokens")
    if recipe.tokens is None and (recipe.alpha is None or recipe.pretraining_tokens is None):
        if recipe.alpha is None and recipe.pretraining_tokens is None:
            raise RecipeError("the recipe states no budget: give tokens (such as 2B), or alpha with pretraining_tokens")
        given, missing = (
            ("alpha", "pretraining_tokens") if recipe.pretraining_tokens is None else ("pretraining_tokens", "alpha")
        )
        raise RecipeError(f"{given} is given without {missing}: give both, or tokens alone")
    if recipe.sequence_length is not None and recipe.tokens_per_step < recipe.sequence_length:
        raise RecipeError(
            f"tokens_per_step is {recipe.tokens_per_step} and sequence_length is {recipe.sequence_length}: "
            "a step must hold at least one sequence"
        )
    if recipe.budget_tokens < recipe.tokens_per_step:
        raise RecipeError(
            f"the budget is {recipe.budget_tokens} tokens and tokens_per_step is {recipe.tokens_per_step}: "
            "raise the budget or lower tokens_per_step"
        )


def _check_folders(recipe: Recipe) -> None:
    output = _resolved("output", recipe.output)
    for key in ("model", "teacher"):
        value = getattr(recipe, key)
        if value is None:
            continue
        folder = _resolved(key, value)
        if folder == output:
            raise RecipeError(f"output and {key} are the same folder {value}: name a new folder for output")
        if folder.is_dir() and (folder in output.parents or output in folder.parents):
            raise RecipeError(
                f"output {recipe.output} and {key} {value} lie one inside the other: name a folder beside it for output"
            )
    if output.exists() and not output.is_dir():
        raise RecipeError(f"output {recipe.output} is a file: name a folder")
    if recipe.teacher is not None and os.path.normpath(recipe.teacher) == os.path.normpath(recipe.model):
        raise RecipeError(
            f"teacher and model are both {recipe.model}: the teacher is the checkpoint that the model was converted from"
        )


def _resolved(key: str, path: str) -> Path:
    try:
        place = Path(path).resolve()
        place.exists()
    except (OSError, RuntimeError) as problem:  # a name that is too long, a loop of links
        raise RecipeError(
            f"{key} {readers.shown(path)} is no path: {getattr(problem, 'strerror', None) or problem}"
        ) from None
    return place


def _check_teacher(recipe: Recipe) -> None:
    if recipe.teacher is not None:
        return
    unused = Recipe(model="", output="", data=())
    for key in ("distillation_weight", "temperature", "teacher_top_k", "teacher_dtype", "attention_matching"):
        if getattr(recipe, key) != getattr(unused, key):
            raise RecipeError(
                f"{key} is given without a teacher: name the source checkpoint as teacher, or remove {key}"
            )
