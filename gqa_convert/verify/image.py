"""A random image with a question, as the processor in a checkpoint prepares them for a vision-language model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.verify.report import first_line

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_WIDTH, _HEIGHT = 96, 64
_QUESTION = "What is in the image?"


@dataclass
class ImageRun:
    """What OUT computed of an image."""

    inputs: dict[str, Any] | None = None
    """The model's inputs; None where they could not be made."""
    output: Any = None
    """The logits of every token."""
    reason: str = ""
    """Why there are no inputs, or why OUT cannot run on them."""


def run_on_image(model: Any, folder: Path) -> ImageRun:
    """Run a model on a random image.

    Args:
        model: a loaded vision-language model.
        folder: a checkpoint with its processor.
    """
    if not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        return ImageRun(reason=f"OUT has no processor ({' or '.join(_PROCESSOR_FILES)})")
    try:
        inputs = _prepare(folder)
    except Exception as problem:  # of transformers, or of the packages for images that it needs
        return ImageRun(reason=f"its processor cannot prepare one ({first_line(problem)})")
    try:
        return ImageRun(inputs, logits_of(model, inputs))
    except Exception as problem:
        return ImageRun(inputs, reason=first_line(problem))


def logits_of(model: Any, inputs: dict[str, Any]) -> Any:
    """The logits of every token, [1, length, vocabulary], in float64."""
    import torch

    cast = {name: each.to(model.dtype) if each.is_floating_point() else each for name, each in inputs.items()}
    with torch.no_grad():
        return model(**cast, use_cache=False).logits.double()


def _prepare(folder: Path) -> dict[str, Any]:
    """The inputs of a model, by name."""
    import numpy as np
    import torch
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    pixels = np.random.default_rng(0).integers(0, 256, (_HEIGHT, _WIDTH, 3), np.uint8)
    prepared = processor(images=[pixels], text=[_prompt(processor)], return_tensors="pt")
    return {name: each for name, each in prepared.items() if isinstance(each, torch.Tensor)}


def _prompt(processor: Any) -> str:
    """A question about an image, with the marks that the processor looks for."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        return str(processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True))
    mark = next(
        (
            value
            for owner in (processor, getattr(processor, "tokenizer", None))
            for name in ("boi_token", "image_token")
            if isinstance(value := getattr(owner, name, None), str)
        ),
        "<image>",
    )
    return f"{mark} {_QUESTION}"
