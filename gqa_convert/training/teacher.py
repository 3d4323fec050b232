"""Loads the teacher, checks it against the student, and runs it without gradients."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gqa_convert.errors import ConfigError, OptionError, RecipeError
from gqa_convert.families.config_sizes import VOCABULARY_KEYS
from gqa_convert.families.loading import check_complete, load_tokenizer, read_config
from gqa_convert.families.wrappers import decoder_config
from gqa_convert.losses.distillation import kl_loss
from gqa_convert.training import sharding

_DTYPES: dict[str, Any] = {"bf16": torch.bfloat16, "float32": torch.float32, "auto": "auto"}


def load_teacher(folder: Path, dtype: str, device: torch.device | str, *, by_first: bool = False) -> Any:
    """Load the teacher in evaluation mode, without gradients, in the given dtype.

    Args:
        folder: a local checkpoint.
        dtype: bf16, float32, or auto for the checkpoint's dtype.
        device: the device to place it on.
        by_first: only the first process reads weights; see `sharding.load`.

    Raises:
        RecipeError: the dtype is unknown.
        CorruptCheckpointError: parameters are missing in the folder.
        Exception: any error of transformers.
    """
    if dtype not in _DTYPES:
        raise RecipeError(f"teacher_dtype is {dtype!r}: give one of {', '.join(_DTYPES)}")
    model, missing = sharding.load(folder, _DTYPES[dtype], by_first=by_first)
    check_complete(
        str(folder), folder, model, missing, "distillation needs a teacher with a language-model head; name one"
    )
    return model.requires_grad_(False).to(device)


def rounds_teacher(stated: str, bytes_each: int, device_type: str) -> bool:
    """Whether a teacher is converted to bfloat16 although its checkpoint is float32: on a GPU by default, where float32
    products take several times as long, since torch uses no TF32 unless it is told to.

    Args:
        stated: the recipe's `teacher_dtype`.
        bytes_each: bytes per parameter in the checkpoint.
        device_type: `cuda`, `cpu` and so on.
    """
    return stated == "auto" and bytes_each == 4 and device_type == "cuda"


def round_teacher(teacher: Any, inputs: Mapping[str, Tensor], labels: Tensor) -> float:
    """Convert a teacher to bfloat16 in place; returns the divergence from its float32 predictions, in nats per token.

    Args:
        teacher: the model from `load_teacher`, in float32.
        inputs: a batch, as `teacher_logits` takes it.
        labels: [b, L], the tokens to predict.
    """
    exact = teacher_logits(teacher, inputs)
    teacher.to(torch.bfloat16)
    divergence, count = kl_loss(teacher_logits(teacher, inputs), exact, labels)
    return float(divergence / count.clamp(min=1))


def shared_vocabulary(student: Path, teacher: Path) -> int:
    """The number of tokens over which student and teacher are compared: the smaller of the two vocabulary sizes, which
    may differ by padding.

    Only configs and tokenizers are read, so that a mismatch is found before any model is loaded.

    Args:
        student: a local checkpoint with its tokenizer.
        teacher: a local checkpoint; its tokenizer is compared if there is one.

    Raises:
        ConfigError: a config does not state the vocabulary size.
        RecipeError: an id stands for different tokens, or the student's tokenizer has tokens beyond the shared part.
    """
    sizes = {folder: _vocabulary_size(folder) for folder in (student, teacher)}
    shared = min(sizes.values())
    tokens = load_tokenizer(student).get_vocab()
    needed = max(tokens.values(), default=-1) + 1
    if needed > shared and len(set(sizes.values())) > 1:
        raise RecipeError(
            f"the teacher {teacher} has logits for {sizes[teacher]} tokens and the student {student} for {sizes[student]}, of which its "
            f"tokenizer uses {needed}: distillation needs a teacher with the student's vocabulary"
        )
    if teacher != student and any(
        (teacher / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
    ):
        other = load_tokenizer(teacher).get_vocab()
        different = sorted((number, token) for token, number in tokens.items() if other.get(token) != number)
        if different:
            number, token = different[0]
            theirs = next((repr(each) for each, its in other.items() if its == number), "nothing")
            raise RecipeError(
                f"token {number} is {token!r} for the student {student} and {theirs} for the teacher {teacher} ({len(different)} ids differ): "
                "distillation needs a teacher with the student's vocabulary"
            )
    return shared


def _vocabulary_size(folder: Path) -> int:
    config = decoder_config(read_config(folder))
    for key in VOCABULARY_KEYS:
        size = config.get(key)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    raise ConfigError(
        f"{folder / 'config.json'} states no vocab_size: distillation must know how many tokens the logits are for"
    )


def teacher_logits(teacher: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The teacher's logits [b, L, V], or its states [b, L, d] if its output layer was removed.

    Autocasting, which may be active for the student, is disabled: the teacher computes in the dtype it was loaded in.

    Args:
        teacher: the model from `load_teacher`.
        batch: the inputs of the student's forward pass, with decoder_input_ids for an encoder-decoder; labels are
            ignored.

    Raises:
        OptionError: an encoder-decoder would get no decoder_input_ids.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "document_ids")}
    if getattr(teacher.config, "is_encoder_decoder", False) and "decoder_input_ids" not in inputs:
        raise OptionError(
            "the teacher is an encoder-decoder, and the batch has no decoder_input_ids: both must be given the same"
        )
    with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
        logits: Tensor = teacher(**inputs, use_cache=False).logits
        return logits
