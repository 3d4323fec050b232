"""CTranslate2, through its own converter."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .client import NEW_TOKENS, Answer, NotSupportedError, Request, head_dim_from_hidden_size


def answer(request: Request) -> Answer:
    """Convert the checkpoint to CTranslate2's format in float32, load the result and answer the request.

    Raises:
        NotSupportedError: the converter has no loader for this model type or head_dim, or the tokenizer lacks a token
            that it needs.
    """
    with head_dim_from_hidden_size(request.config):
        return _ask(request)


def _ask(request: Request) -> Answer:
    import ctranslate2

    folder = request.scratch / "ctranslate2"
    _convert(request, folder)
    names = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if missing := [name for name in ("bos_token", "eos_token", "unk_token") if name in stated and stated[name] is None]:
        raise NotSupportedError(
            f"it needs a tokenizer with bos, eos and unknown tokens, and this one has no {missing[0]}"
        )
    generator = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32")
    made = generator.generate_batch(
        [[names[token] for token in prompt] for prompt in request.prompts],
        max_batch_size=1,
        beam_size=1,
        sampling_topk=1,
        max_length=NEW_TOKENS,
        include_prompt_in_result=False,
        end_token=[],
        return_end_token=True,
    )
    tokens = [[int(token) for token in each.sequences_ids[0]] for each in made]
    return Answer(
        tokens, [_logits(generator, *each) for each in zip(request.sequences, request.positions, strict=True)]
    )


def _logits(generator: Any, sequence: list[int], positions: list[int]) -> Any:
    import numpy as np

    return np.array(generator.forward_batch([sequence]))[0, positions].astype(np.float32)


def _convert(request: Request, folder: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc, unused-ignore]
        def load_tokenizer(self, tokenizer_class: Any, model_name_or_path: str, **options: Any) -> Any:
            if request.text:
                return super().load_tokenizer(tokenizer_class, model_name_or_path, **options)
            names = {f"<{number}>": number for number in range(request.config["vocab_size"])}
            return SimpleNamespace(get_vocab=lambda: names, bos_token="<1>", eos_token="<2>", unk_token="<0>")

    try:
        Converter(str(request.folder)).convert(str(folder), quantization="float32")
    except ValueError as problem:
        if "No conversion is registered" in str(problem):
            raise NotSupportedError(f"its converter has no loader for {request.config['model_type']}") from None
        raise
    except AttributeError:
        if request.config["model_type"] == "phi":
            raise NotSupportedError(
                "its converter reads phi only in the layout of Microsoft's first release, not in that of transformers"
            ) from None
        raise
