"""The models of an evaluation: checked before any weights are loaded, then loaded one after the
other.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.source import open_local
from gqa_convert.conversion.plan import make_plan
from gqa_convert.data.model_tokenizer import has_sentinels, refuse_languages, usable_tokenizer
from gqa_convert.data.sources import Source
from gqa_convert.errors import GQAConvertError, OptionError
from gqa_convert.families import loading
from gqa_convert.families.context_length import stated_positions
from gqa_convert.runtime.json_objects import JsonObject
from gqa_convert.runtime.paths import expanded

CAUSAL, SPANS, PAIRS, SPEECH = "causal", "spans", "pairs", "speech"
_HEAD = (
    "evaluate scores the predictions of one; name the language model that the checkpoint was made "
    "from"
)


class Candidate(NamedTuple):
    """A model to evaluate.

    Attributes:
        name: that the user gave.
        folder: where it is.
        config: content of its config.json.
        tokenizer: of the model.
        stated: what its entry in the results states besides what is measured.
    """

    name: str
    folder: Path
    config: JsonObject
    tokenizer: Any
    stated: JsonObject


def find_models(names: Sequence[str], revision: str | None) -> list[Candidate]:
    """Find models, and download those that are not local from the Hub.

    Args:
        names: folders and Hub ids.
        revision: of Hub ids; folders have none.

    Raises:
        NoLanguageModelError: a model was saved without its language-model head.
        DataError: a model has no tokenizer.
        GQAConvertError: as `open_local`.
    """
    found = []
    for name in names:
        checkpoint = open_local(name, revision)
        folder = checkpoint.local_folder
        config = checkpoint.config
        loading.check_language_model(name, config, _HEAD)
        shown = expanded(name)
        tokenizer = usable_tokenizer(folder)
        stated: JsonObject = {
            "model": shown,
            "revision": checkpoint.revision,
            "fingerprint": fingerprint(checkpoint),
        }
        with suppress(GQAConvertError):  # a model that can't be converted can still be evaluated
            stated["kv_bytes_per_token"] = make_plan(checkpoint, 1).kv_cache_bytes().before
        found.append(Candidate(shown, folder, config, tokenizer, stated))
    return found


def common_objective(models: Sequence[Candidate], data: Source | None) -> str:
    """The objective on which all models are scored: causal, spans, pairs or speech.

    Args:
        models: all of them.
        data: the text, pairs among it; or None.

    Raises:
        OptionError: the models have no objective or no tokenizer in common.
        DataError: a tokenizer marks the languages of texts, which pairs do not state.
    """
    pairs = data is not None and data.kind == "pairs"
    first = models[0]
    objective = _objective(first, pairs)
    vocabulary = {number: token for token, number in first.tokenizer.get_vocab().items()}
    for model in models[1:]:
        other = _objective(model, pairs)
        if other != objective:
            raise OptionError(
                f"{model.name} can't be compared with {first.name}: one is scored on {other} and "
                f"one on {objective}; evaluate decoders, encoder-decoders and models that hear "
                "apart"
            )
        for token, number in model.tokenizer.get_vocab().items():
            if vocabulary.get(number, token) != token:
                raise OptionError(
                    f"{model.name} can't be compared with {first.name}: their tokenizers differ; "
                    "evaluate each by itself, and compare bits per byte"
                )
    return objective


def _objective(model: Candidate, pairs: bool) -> str:
    hears = loading.hears(model.config)
    if hears or not loading.is_encoder_decoder(model.config):
        if pairs:
            raise OptionError(
                f"{model.name} is no encoder-decoder of text, which --source-field and "
                "--target-field are for: leave them out"
            )
        return SPEECH if hears else CAUSAL
    if pairs:
        refuse_languages(model.tokenizer)
        return PAIRS
    if not has_sentinels(model.tokenizer):
        raise OptionError(
            f"{model.name} has no sentinel tokens for span corruption: give pairs, with "
            "--source-field and --target-field"
        )
    return SPANS


def common_length(
    models: Sequence[Candidate], stated: str, length: int | None, default: int
) -> int:
    """A number of tokens for which all models have positions.

    Args:
        models: all of them.
        stated: how the user stated it, for the message.
        length: that the user stated.
        default: the most if none is stated.

    Raises:
        OptionError: a model has fewer positions.
    """
    for model in models:
        positions = stated_positions(model.config) or length or default
        if (length or 0) > positions:
            raise OptionError(
                f"{stated}, and {model.name} has positions for {positions} tokens: lower it"
            )
        default = min(default, positions)
    return length or default


def load(candidate: Candidate, dtype: str, device: str) -> Any:
    """The model in evaluation mode on a device.

    Args:
        candidate: the model.
        dtype: to compute in; auto means float32 on a CPU and the checkpoint's dtype elsewhere.
        device: to put it on.

    Raises:
        CorruptCheckpointError: it can't be loaded.
        NoLanguageModelError: it was saved without its language-model head.
    """
    if dtype == "auto" and device.startswith("cpu"):
        dtype = "float32"
    model = loading.load_complete(candidate.name, candidate.folder, dtype, _HEAD)
    return model.requires_grad_(False).to(device)
