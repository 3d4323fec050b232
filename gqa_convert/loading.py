"""Load a checkpoint with transformers: from the disk alone, without code from it, and without progress bars of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def _no_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_causal_lm(folder: Path, dtype: Any) -> tuple[Any, list[str]]:
    """The model on the CPU, in evaluation mode, and the names of parameters for which the folder has no fitting tensor.

    Args:
        folder: a local checkpoint.
        dtype: a torch type, or "auto" for the checkpoint's own.

    Raises:
        Exception: whatever transformers raises.
    """
    from transformers import AutoModelForCausalLM

    with _no_bars():
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    return model.eval(), [str(key) for key in (*info["missing_keys"], *info["mismatched_keys"])]


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's own tokenizer.

    Raises:
        Exception: whatever transformers raises.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
