"""The models of an evaluation: checked before any weights are loaded, then opened one after the other."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.paths import expanded, local_path
from gqa_convert.checkpoint.resource_errors import is_out_of_memory
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import DataError, DeviceMemoryError, OptionError
from gqa_convert.families.context_length import LONGEST, SPAN_LENGTH, stated_positions
from gqa_convert.families.loading import (
    TASKS,
    auto_class,
    check_complete,
    check_language_model,
    explained,
    is_encoder_decoder,
    load_model,
    read_config,
)
from gqa_convert.text.calibration import usable_tokenizer
from gqa_convert.text.decoder_start import decoder_start, starts_with_last
from gqa_convert.text.framing import refuse_languages
from gqa_convert.text.scoring.material import Material
from gqa_convert.text.spans import has_sentinels

DTYPES = ("auto", "float32", "bfloat16", "float16")
CAUSAL, SPANS, PAIRS = "causal", "spans", "pairs"
_HEAD = "evaluate scores the predictions of one; name the language model that the checkpoint was made from"


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate.

    Attributes:
        name: that the user gave.
        revision: commit on the Hub, None for a local folder.
        folder: where it is.
        config: content of its config.json.
        tokenizer: of the model.
    """

    name: str
    revision: str | None
    folder: Path
    config: JsonObject
    tokenizer: Any

    @property
    def seq2seq(self) -> bool:
        return is_encoder_decoder(self.config)

    @property
    def positions(self) -> int | None:
        """The number of positions, None if it is unlimited or not stated."""
        return stated_positions(self.config)

    def decoder_start(self) -> int:
        """The first token of the decoder's input."""
        return decoder_start(self.folder, self.config, self.tokenizer)

    @property
    def starts_with_last(self) -> bool:
        """Whether the decoder's input begins with the target's last token instead."""
        return starts_with_last(self.config)


def find_models(names: Sequence[str], revision: str | None) -> list[Candidate]:
    """Find models, and download those that are not local from the Hub.

    Args:
        names: folders and Hub ids.
        revision: of those that are Hub ids.

    Raises:
        OptionError: a model has audio input.
        NoLanguageModelError: a model was saved without its language-model head.
        DataError: a model has no tokenizer.
        GQAConvertError: as `open_checkpoint`.
    """
    remote = [name for name in map(expanded, names) if not local_path(name).exists()]
    found = []
    for name in map(expanded, names):
        checkpoint = open_checkpoint(name, revision=revision if not remote or name in remote else None, download=True)
        assert checkpoint.folder is not None
        config = read_config(checkpoint.folder)
        check_language_model(name, config, _HEAD)
        if is_encoder_decoder(config) and auto_class(config) == TASKS[2]:
            raise OptionError(f"{name} has audio input, and evaluate scores models with text input: leave it out")
        found.append(
            Candidate(name, checkpoint.revision, checkpoint.folder, config, usable_tokenizer(checkpoint.folder))
        )
    return found


def common_objective(models: Sequence[Candidate], *, pairs: bool) -> str:
    """The objective on which all models are scored: causal, spans or pairs.

    Args:
        models: all of them.
        pairs: whether pairs of texts were named.

    Raises:
        OptionError: the models have no objective in common.
    """
    first = models[0]
    for model in models:
        if model.seq2seq != first.seq2seq:
            raise OptionError(
                f"{first.name} and {model.name} can't be compared: only one of them is an encoder-decoder; evaluate them apart"
            )
        if pairs and not model.seq2seq:
            raise OptionError(
                f"--source-field and --target-field are for encoder-decoders, and {model.name} is a decoder: use --text-field, or leave them out"
            )
        if model.seq2seq and not pairs and not has_sentinels(model.tokenizer):
            raise OptionError(
                f"{model.name} has no sentinel tokens for span corruption: name pairs of texts with --source-field and --target-field"
            )
    return PAIRS if pairs else SPANS if first.seq2seq else CAUSAL


def check_languages(models: Sequence[Candidate]) -> None:
    """Refuse tokenizers that mark the languages of texts.

    Raises:
        OptionError: one does.
    """
    for model in models:
        try:
            refuse_languages(model.tokenizer)
        except DataError as problem:
            raise OptionError(f"{model.name}: {problem}") from None


def common_context(
    models: Sequence[Candidate], objective: str, context: int | None, stride: int | None
) -> tuple[int, int | None]:
    """The number of tokens of each window or example, the same for all models, and the stride of windows.

    Raises:
        OptionError: context or stride is out of range, or a model has fewer positions.
    """
    for model in models:
        if context is not None and model.positions is not None and context > model.positions:
            raise OptionError(
                f"--context is {context}, and {model.name} has positions for {model.positions} tokens: lower it"
            )
    longest = min(
        [SPAN_LENGTH if objective == SPANS else LONGEST, *(model.positions for model in models if model.positions)]
    )
    chosen = longest if context is None else context
    if chosen < 1:
        raise OptionError(f"--context is {chosen}, expected a number above 0")
    if objective != CAUSAL:
        if stride is not None:
            raise OptionError(
                "--stride is for causal models, whose windows overlap, and these are encoder-decoders: leave it out"
            )
        return chosen, None
    step = chosen if stride is None else stride
    if not 1 <= step <= chosen:
        raise OptionError(
            f"--stride is {step}, expected 1 to {chosen}, the context: tokens between two windows would not be scored"
        )
    return chosen, step


@contextmanager
def opened(candidate: Candidate, dtype: str, device: str) -> Iterator[Any]:
    """A context with the model in evaluation mode on a device; its memory is freed at the end.

    Args:
        candidate: the model.
        dtype: to compute in, one of `DTYPES`; auto means float32 on a CPU and the checkpoint's dtype elsewhere.
        device: to put it on.

    Raises:
        CorruptCheckpointError: it can't be loaded.
        NoLanguageModelError: it was saved without its language-model head.
        DeviceMemoryError: the memory does not suffice.
    """
    import torch

    box = [_load(candidate, dtype, device)]
    try:
        yield box[0]
    finally:
        box.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _load(candidate: Candidate, dtype: str, device: str) -> Any:
    import torch

    own = "auto" if device != "cpu" else torch.float32
    with memory_explained(candidate.name), explained(candidate.name):
        model, missing = load_model(candidate.folder, own if dtype == "auto" else getattr(torch, dtype))
        check_complete(candidate.name, candidate.folder, model, missing, _HEAD)
        return model.requires_grad_(False).to(device)


@contextmanager
def memory_explained(name: str) -> Iterator[None]:
    """A context that turns out-of-memory errors into a single line.

    Raises:
        DeviceMemoryError: the memory is full.
    """
    try:
        yield
    except Exception as problem:
        if is_out_of_memory(problem):
            raise DeviceMemoryError(
                f"out of memory with {name}: lower --batch or --context, use --dtype bfloat16, or a device with more memory"
            ) from None
        raise


def check_tokens(model: Any, material: Material, candidate: Candidate) -> None:
    """Refuse text with tokens for which the model has no embedding.

    Raises:
        DataError: there is such a token.
    """
    size, largest = model.get_input_embeddings().num_embeddings, int(material.ids.max())
    if largest >= size:
        raise DataError(
            f"the tokenizer of {candidate.name} makes the token {largest}, and the model has {size} embeddings: copy the tokenizer that "
            "belongs to it"
        )
