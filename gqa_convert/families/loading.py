"""Loads checkpoints with transformers, only from the disk and without transformers' progress bars.

Code from a checkpoint never runs. Results with a modelling file of this package load through the
package's own copy.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gqa_convert.errors import (
    CorruptCheckpointError,
    GQAConvertError,
    NoLanguageModelError,
    first_line,
    is_out_of_memory,
)
from gqa_convert.runtime.json_objects import Config, JsonObject, parse_object

from .composite import is_composite
from .records import record_of
from .table import check_per_layer_config

TASKS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
)
"""transformers' auto classes of models with logits over a vocabulary."""
_HEADLESS = (
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModel",
)
"""The auto classes of models without a language-model head."""
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How the names of classes with a language-model head end, almost all of them."""


for _noisy in ("torchao", "torch.utils._pytree"):
    # transformers and accelerate import torchao where it is installed, which reports kernels that
    # are not used here
    logging.getLogger(_noisy).setLevel(logging.ERROR)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing warnings and progress bars."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def read_config(folder: Path) -> JsonObject:
    """What config.json holds; an empty dict if it can't be read, which transformers reports when it
    loads.
    """
    return read_object(folder / "config.json")


def read_object(path: Path) -> JsonObject:
    """The JSON object in a file; empty if it can't be read."""
    try:
        return parse_object(path.read_bytes(), str(path))
    except (OSError, CorruptCheckpointError):
        return {}


# What a config.json says about a model's class


def is_encoder_decoder(config: Config) -> bool:
    """Whether a checkpoint has an encoder and a decoder, by its config.json or else by its model
    type.
    """
    stated = config.get("is_encoder_decoder")
    return stated if isinstance(stated, bool) else record_of(config).encoder is not None


def auto_class(config: Config) -> str:
    """The auto class of a checkpoint: of the class that it was saved from, or else of its type's
    language model.

    Args:
        config: what its config.json holds.

    Returns:
        One of `TASKS`.
    """
    if is_composite(config) and not is_encoder_decoder(config):
        return TASKS[3]
    stated = _stated_class(config)
    if stated in TASKS:
        return str(stated)
    if not is_encoder_decoder(config):
        return TASKS[0]
    stock_type = record_of(config).stock_type
    return next((auto for auto in TASKS[1:] if stock_type in _classes(auto)), TASKS[1])


def hears(config: Config) -> bool:
    """Whether the model is an encoder-decoder whose encoder reads sound."""
    return is_encoder_decoder(config) and auto_class(config) == TASKS[2]


def read_kind(config: Config) -> str:
    """What the model reads, in the words of messages: "sounds" or "text"."""
    return "sounds" if hears(config) else "text"


def encoder_shape(config: Any, length: int) -> tuple[int, ...]:
    """The shape of one picture, or of the features of one sound, that an encoder reads.

    Args:
        config: of a loaded encoder-decoder whose encoder reads no text.
        length: frames of a sound, where windows do not have one length.
    """
    encoder = getattr(config, "encoder_config", getattr(config, "encoder", config))
    if hasattr(encoder, "image_size"):
        sides = encoder.image_size
        return encoder.num_channels, *(sides if isinstance(sides, list | tuple) else (sides, sides))
    if hasattr(config, "num_mel_bins"):  # Whisper, which has bins first
        return config.num_mel_bins, 2 * config.max_source_positions
    return length, getattr(encoder, "num_mel_bins", None) or encoder.input_feat_per_channel


def headless_class(config: Config) -> str | None:
    """The auto class of a checkpoint that was saved without a language-model head; None if it has
    one or does not say.

    Args:
        config: what its config.json holds.

    Returns:
        The auto class of a classifier, of a question-answering model or, for the layers without a
        head, `AutoModel`.
    """
    if any(name.endswith(_HEADS) for name in _architectures(config)):
        return None  # found without importing transformers
    stated = _stated_class(config)
    return None if stated in TASKS else stated


def _architectures(config: Config) -> list[str]:
    return list(map(str, config.get("architectures") or ()))


def _stated_class(config: Config) -> str | None:
    """The first auto class that one of the stated architectures belongs to."""
    names = {name.removeprefix("GQA") for name in _architectures(config)}
    for auto in (*TASKS, *_HEADLESS):
        if not names.isdisjoint(map(str, _classes(auto).values())):
            return auto
    return None


def _classes(auto: str) -> dict[str, Any]:
    """transformers' table of an auto class: by model type, the names of classes."""
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, auto)._model_mapping._model_mapping)


def check_language_model(name: str, config: Config, advice: str) -> None:
    """Refuse a checkpoint whose config says that it has no language-model head, before its weights
    are loaded.

    A checkpoint of only the layers passes if its head may be tied to its embeddings.

    Args:
        name: of the checkpoint, for the message.
        config: what its config.json holds.
        advice: what needs the head, and what to do.

    Raises:
        NoLanguageModelError: it has none.
    """
    auto = headless_class(config)
    if auto is not None and (auto != "AutoModel" or config.get("tie_word_embeddings") is False):
        raise NoLanguageModelError(
            f"{name} was saved as {_architectures(config)[0]}, which has no language-model head: "
            f"{advice}"
        )


def check_complete(name: str, folder: Path, missing: list[str], advice: str) -> None:
    """Refuse a loaded model some of whose parameters the checkpoint does not hold.

    Args:
        name: of the checkpoint, for the message.
        folder: where it is.
        missing: the names that `load_model` returns.
        advice: what needs a language-model head, and what to do without one.

    Raises:
        NoLanguageModelError: the checkpoint was saved without a language-model head.
        CorruptCheckpointError: the parameters belong to something that it should hold.
    """
    if not missing:
        return
    # a head that is missing is not tied to the embeddings
    untied = {**read_config(folder), "tie_word_embeddings": False}
    check_language_model(name, untied, advice)
    raise CorruptCheckpointError(
        f"{name} has no fitting tensor for {missing[0]} ({len(missing)} in all): convert or "
        "fetch it again"
    )


# Loading


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn transformers' errors about a checkpoint into one line; errors about too little memory
    pass unchanged.

    Raises:
        CorruptCheckpointError: transformers can't load the checkpoint.
    """
    try:
        yield
    except Exception as problem:
        if isinstance(problem, GQAConvertError) or is_out_of_memory(problem):
            raise
        raise CorruptCheckpointError(
            f"{name} can't be loaded by transformers ({first_line(problem)}): check its files"
        ) from problem


def _register(config: Config) -> None:
    """Make the model type of a result with a modelling file known to transformers, so that the
    checkpoint's copy of the file need not run.
    """
    if record_of(config).is_converted:
        from .modeling import register_modeling

        register_modeling(config["model_type"])


def load_model(folder: Path, dtype: Any, **options: Any) -> tuple[Any, list[str]]:
    """Load any model with logits on the CPU, in evaluation mode; encoder-decoder models too.

    Args:
        folder: a local checkpoint.
        dtype: a torch type, or "auto" for the type that the checkpoint has.
        options: further options of `from_pretrained`.

    Returns:
        The model, and the parameters for which the folder has no fitting tensor: their names, and
        both shapes where they differ.

    Raises:
        Exception: whatever transformers raises.
    """
    import transformers

    config = read_config(folder)
    check_per_layer_config(config, f"{folder}/config.json")
    _register(config)
    with quiet():  # missing tensors are returned instead of reported
        model, info = getattr(transformers, auto_class(config)).from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    misfits = [
        f"{name}, which is {list(stored)} where the model needs {list(expected)}"
        for name, stored, expected in info["mismatched_keys"]
    ]
    return model.eval(), sorted(info["missing_keys"]) + sorted(misfits)


def load_complete(name: str, folder: Path, dtype: Any, advice: str, **options: Any) -> Any:
    """The model of `load_model`, of which the checkpoint holds all parameters.

    Args:
        name: of the checkpoint, for messages.
        folder: where it is.
        dtype: as for `load_model`.
        advice: what needs a language-model head, and what to do without one.
        options: further options of `from_pretrained`.

    Raises:
        NoLanguageModelError: the checkpoint was saved without a language-model head.
        CorruptCheckpointError: it lacks something else, or transformers can't load it.
    """
    with explained(name):
        model, missing = load_model(folder, dtype, **options)
    check_complete(name, folder, missing, advice)
    return model


def model_of_config(folder: Path, dtype: Any, **options: Any) -> Any:
    """The model of `load_model` with the numbers that its class begins with.

    Args:
        folder: a local checkpoint, whose weights are not read.
        dtype: a torch type.
        options: further options of `from_config`.

    Raises:
        Exception: whatever transformers raises.
    """
    import transformers

    auto = getattr(transformers, auto_class(read_config(folder)))
    config = _load_config(folder)
    return auto.from_config(config, dtype=dtype, trust_remote_code=False, **options)


def _load_config(folder: Path) -> Any:
    from transformers import AutoConfig

    _register(read_config(folder))
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def outline_model(folder: Path) -> Any:
    """The model of `load_model` with uninitialised parameters and buffers, for a process that
    receives them and their types from another.

    Their memory is reserved but not touched, so that the system provides it only when something is
    written.

    Args:
        folder: a local checkpoint, whose weights are not read.

    Raises:
        ValueError: a model of this class can't be made without its numbers.
        Exception: whatever transformers raises.
    """
    import torch

    with torch.device("meta"):
        model = model_of_config(folder, torch.float32)
    for module in model.modules():
        kept = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        if any(value.is_meta for value in kept):
            name = type(module).__name__
            raise ValueError(f"{name} keeps numbers outside its parameters and buffers")
    model.to_empty(device="cpu")
    model.tie_weights()
    return model.eval()


def check_readable_config(folder: Path) -> None:
    """Refuse a config.json of a type that transformers knows, with values that it refuses.

    Raises:
        CorruptCheckpointError: the config is such a one.
    """
    from transformers import CONFIG_MAPPING

    stated = read_config(folder)
    if stated.get("model_type") in CONFIG_MAPPING or record_of(stated).is_converted:
        with explained(f"{folder}/config.json"):
            _load_config(folder)


def untie(model: Any, name: str) -> None:
    """Give a parameter that a model shares under several names a tensor of its own under one of
    them.

    Args:
        model: a model without its numbers; the new tensor has none either.
        name: the name of the parameter.
    """
    import torch

    module, _, leaf = name.rpartition(".")
    owner = model.get_submodule(module)
    shared = getattr(owner, leaf)
    setattr(owner, leaf, torch.nn.Parameter(torch.empty_like(shared), shared.requires_grad))


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, which needs no code of a modelling file.

    Raises:
        Exception: whatever transformers raises.
    """
    from transformers import AutoTokenizer

    with quiet():  # about model types of results, which transformers does not know
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def cache_name(model: Any) -> str:
    """What transformers calls the cache among arguments and outputs: `cache` since 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
