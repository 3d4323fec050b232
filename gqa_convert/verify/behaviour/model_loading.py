"""Loads a checkpoint's model for the checks on behaviour."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gqa_convert.families import loading
from gqa_convert.verify.checkpoint_reader import CONFIG, INDEX, first_line
from gqa_convert.verify.report import Failure

FLOAT32_LIMIT = 3_000_000_000
"""Models of more parameters run in the checkpoint's own type, to fit in memory."""


def load_model(folder: Path, parameters: int, *, own_code: Sequence[str] = ()) -> loading.AnyModel:
    """A model on the CPU in evaluation mode, in float32 unless it has too many parameters.

    Args:
        folder: the checkpoint.
        parameters: about how many numbers it has.
        own_code: the names of the files in it that may run: its modelling file, and what that imports.

    Raises:
        Failure: transformers cannot load it, or finds no tensor for one of its parameters.
    """
    import torch

    dtype = torch.float32 if parameters <= FLOAT32_LIMIT else "auto"
    try:
        if own_code:
            with _with_this_code_alone(folder, own_code) as alone:
                found = loading.load_any_model(alone, dtype, run_code=True)
        else:
            found = loading.load_any_model(folder, dtype)
    except Exception as problem:
        raise Failure(f"transformers cannot load {folder} ({first_line(problem)})") from None
    if found.missing:
        raise Failure(
            f"transformers finds no fitting tensor for {min(found.missing)} in {folder} ({len(found.missing)} missing)"
        )
    return found


@contextmanager
def _with_this_code_alone(out: Path, own_code: Sequence[str]) -> Iterator[Path]:
    """A temporary folder with OUT's weights, configs and modelling files, and none of the other code beside them."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "gqa_checkpoint"  # a constant name: transformers keeps a copy of the code under it
        folder.mkdir()
        names = {CONFIG, "generation_config.json", INDEX} | {path.name for path in out.glob("*.safetensors")}
        for name in names:
            if (out / name).is_file():
                (folder / name).symlink_to((out / name).resolve())
        for name in own_code:
            shutil.copyfile(out / name, folder / name)
        yield folder
