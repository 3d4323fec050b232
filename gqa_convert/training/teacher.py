"""Loads the teacher, checks it against the student, and runs it without gradients."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gqa_convert.errors import ConfigError, RecipeError
from gqa_convert.families.composite import decoder_config
from gqa_convert.families.config_sizes import VOCABULARY_KEYS
from gqa_convert.families.context_length import stated_count
from gqa_convert.families.loading import check_complete, load_tokenizer, read_config
from gqa_convert.training import sharding


def load_teacher(folder: Path, device_type: str, *, by_first: bool = False) -> Any:
    """Load a model in evaluation mode on the CPU, without gradients.

    It has its checkpoint's dtype, but for a GPU bfloat16 instead of float32, whose products take several times as long.

    Args:
        folder: a local checkpoint.
        device_type: where it will run: `cuda`, `cpu` and so on.
        by_first: only the first process reads weights; see `sharding.load`.

    Raises:
        CorruptCheckpointError: parameters are missing in the folder.
        Exception: any error of transformers.
    """
    config = read_config(folder)
    in_float32 = (config.get("dtype") or config.get("torch_dtype") or "float32") == "float32"
    dtype = torch.bfloat16 if in_float32 and device_type == "cuda" else "auto"
    model, missing = sharding.load(folder, dtype, by_first=by_first)
    check_complete(
        str(folder), folder, model, missing, "distillation needs a teacher with a language-model head; name one"
    )
    return model.requires_grad_(False)


def check_vocabularies(student: Path, teacher: Path) -> None:
    """Check that student and teacher mean the same tokens; their vocabulary sizes may differ by padding.

    Only configs and tokenizers are read, so that a mismatch is found before any model is loaded.

    Args:
        student: a local checkpoint with its tokenizer.
        teacher: a local checkpoint; its tokenizer is compared if there is one.

    Raises:
        ConfigError: a config does not state the vocabulary size.
        RecipeError: an id stands for different tokens, or the student's tokenizer has tokens beyond the shared part.
    """
    own, theirs = _vocabulary_size(student), _vocabulary_size(teacher)
    tokens = load_tokenizer(student).get_vocab()
    needed = max(tokens.values(), default=-1) + 1
    if own != theirs and needed > min(own, theirs):
        raise RecipeError(
            f"the teacher {teacher} has logits for {theirs} tokens and the student {student} for {own}, of which its "
            f"tokenizer uses {needed}: distillation needs a teacher with the student's vocabulary"
        )
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    if not any((teacher / name).is_file() for name in files):
        return
    others = load_tokenizer(teacher).get_vocab()
    different = [(number, token) for token, number in tokens.items() if others.get(token) != number]
    if different:
        number, token = min(different)
        raise RecipeError(
            f"token {number} is {token!r} for the student {student} and another one for the teacher {teacher} ({len(different)} ids differ): "
            "distillation needs a teacher with the student's vocabulary"
        )


def _vocabulary_size(folder: Path) -> int:
    size = stated_count(decoder_config(read_config(folder)), VOCABULARY_KEYS)
    if size is None:
        raise ConfigError(
            f"{folder / 'config.json'} states no vocab_size: distillation must know how many tokens the logits are for"
        )
    return size


def teacher_logits(teacher: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """The teacher's logits [b, L, V], or its states [b, L, d] if its output layer was removed.

    Autocasting, which may be active for the student, is disabled: the teacher computes in its own dtype.

    Args:
        teacher: the model from `load_teacher`.
        inputs: those of the student's forward pass.
    """
    inputs = {name: each.to(teacher.dtype) if each.is_floating_point() else each for name, each in inputs.items()}
    with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
        logits: Tensor = teacher(**inputs, use_cache=False).logits
        return logits
