"""Load a checkpoint with transformers: from the disk alone, and without progress bars of its own.

Code from a checkpoint never runs, unless the caller vouches for it; results with a modelling file of this package are loaded through
the package's own copy.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gqa_convert.errors import CorruptCheckpointError, GQAConvertError

TASKS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
"""transformers' auto classes for models with logits over a vocabulary."""

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
_OWN = "gqa_"
"""What the model types of results with a modelling file begin with, and in capitals the names of their classes."""


@contextmanager
def no_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _no_warnings() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json holds; nothing if it can't be read, which transformers is left to say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def auto_class(config: dict[str, Any]) -> str:
    """The auto class for a checkpoint: that of the model it was saved from, or else of its model type's language model.

    Args:
        config: what its config.json holds.

    Returns:
        One of `TASKS`.
    """
    from transformers.models.auto import modeling_auto

    stated = config.get("architectures")
    names = {str(name).removeprefix(_OWN[:-1].upper()) for name in stated} if isinstance(stated, list) else set()
    model_type = str(config.get("model_type")).removeprefix(_OWN)
    tables = [dict(getattr(modeling_auto, mapping)) for mapping in _MAPPINGS]
    for task, table in zip(TASKS, tables, strict=True):
        if names & set(table.values()):
            return task
    if not config.get("is_encoder_decoder"):
        return TASKS[0]
    return TASKS[2] if model_type in tables[2] and model_type not in tables[1] else TASKS[1]


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an error means that the memory, a GPU's or the machine's, is full."""
    return isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(problem)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """What transformers says about a checkpoint that it can't load, as one line; memory that does not suffice is left to the caller.

    Raises:
        CorruptCheckpointError: it can't load it.
    """
    try:
        yield
    except GQAConvertError:
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        first = next((line.strip() for line in str(problem).splitlines() if line.strip()), "")
        raise CorruptCheckpointError(
            f"{name} can't be loaded by transformers ({type(problem).__name__}: {first[:300]}): check its files"
        ) from problem


def _register(folder: Path) -> None:
    """Make the model type of a result of ours known to transformers, so that its own copy of the code need not run."""
    model_type = read_config(folder).get("model_type")
    if isinstance(model_type, str) and model_type.startswith(_OWN):
        from gqa_convert.modeling import register

        register(model_type)


def _load(task: str, folder: Path, dtype: Any, *, run_code: bool, **options: Any) -> tuple[Any, list[str]]:
    import transformers

    if not run_code:
        _register(folder)
    with no_bars(), _no_warnings():  # what its report would say of missing tensors is returned
        model, info = getattr(transformers, task).from_pretrained(
            folder, dtype=dtype, trust_remote_code=run_code, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True,
            **options,
        )  # fmt: skip
    return model.eval(), [*sorted(info["missing_keys"]), *sorted(map(_mismatch, info["mismatched_keys"]))]


def _mismatch(entry: tuple[str, Any, Any]) -> str:
    name, stored, expected = entry
    return f"{name}, which is {list(stored)} where the model needs {list(expected)}"


def load_causal_lm(folder: Path, dtype: Any) -> tuple[Any, list[str]]:
    """The model on the CPU, in evaluation mode, and the parameters for which the folder has no fitting tensor: their names, and both
    shapes where a tensor has another one than the model needs.

    Args:
        folder: a local checkpoint.
        dtype: a torch type, or "auto" for the checkpoint's own.

    Raises:
        Exception: whatever transformers raises.
    """
    return _load(TASKS[0], folder, dtype, run_code=False)


def load_model(folder: Path, dtype: Any, *, run_code: bool = False, **options: Any) -> tuple[Any, list[str]]:
    """The same for any model with logits, encoder-decoder models too.

    Args:
        folder: a local checkpoint.
        dtype: a torch type, or "auto" for the checkpoint's own.
        run_code: execute the checkpoint's own modelling file, as whoever lacks this package must; for files that are known only.
        options: further ones of `from_pretrained`.

    Raises:
        Exception: whatever transformers raises.
    """
    return _load(auto_class(read_config(folder)), folder, dtype, run_code=run_code, **options)


def outline_model(folder: Path, dtype: Any) -> Any:
    """What `load_model` returns, with parameters and buffers that hold anything: for a process that another one sends them to.

    Their memory is set aside and not touched, so that it is not taken before somebody writes to it.

    Args:
        folder: a local checkpoint; of its weights nothing is read.
        dtype: a torch type.

    Raises:
        ValueError: a model of this class can't be made without its numbers.
        Exception: whatever transformers raises.
    """
    import torch
    import transformers

    _register(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        model = getattr(transformers, auto_class(read_config(folder))).from_config(config, dtype=dtype, trust_remote_code=False)
    made: dict[int, Any] = {}  # tied parameters stay one
    for module in model.modules():
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in vars(module).values()):
            raise ValueError(f"{type(module).__name__} keeps numbers outside its parameters and buffers")
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    empty = torch.empty_like(tensor, device="cpu")
                    kind = isinstance(tensor, torch.nn.Parameter)
                    tensors[name] = made.setdefault(id(tensor), torch.nn.Parameter(empty, tensor.requires_grad) if kind else empty)
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's own tokenizer, for which no code of a modelling file is needed.

    Raises:
        Exception: whatever transformers raises.
    """
    from transformers import AutoTokenizer

    with _no_warnings():  # it does not know the model types of our results, and need not
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
