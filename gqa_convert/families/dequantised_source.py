"""A GGUF file as a source: its weights lie dequantised in a hidden folder for as long as a command needs them."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gqa_convert._version import __version__
from gqa_convert.checkpoint.byte_sizes import size
from gqa_convert.checkpoint.gguf_files import GGUFModel
from gqa_convert.checkpoint.locks import lock_folder
from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.checkpoint.publication import StagedFolder
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.errors import InterruptedRunError, NoSpaceError, OutputError

_STATE = ".gqa-dequantised.json"
Note = Callable[[str], None]


def hidden_folder(out: Path) -> Path:
    """Where the dequantised weights lie while `out` is made or checked."""
    real = Path(os.path.realpath(out))
    return real.parent / f".{real.name}.gqa-dequantised"


def describe_gguf(model: GGUFModel) -> str:
    """What is read and what becomes of it, as a sentence."""
    stored, plain = model.file.stat().st_size, model.plain_bytes
    lost = f", and what {model.quantisation} lost stays lost" if model.is_quantised else ""
    return f"the source is a GGUF file ({model.quantisation}, {size(stored)}): its weights are written in {model.dtype} ({size(plain)}){lost}"


def describe_needs(model: GGUFModel, out: Path | None = None) -> str:
    """The memory and the disk space that dequantising takes, as a sentence.

    Args:
        model: the file.
        out: the result beside which the dequantised weights lie while it is made; None where they are the result.
    """
    import torch

    free = available_memory(torch.device("cpu"))
    memory = f" of {size(free)} free" if free is not None else ""
    disk = f" in {hidden_folder(out)} until the end" if out is not None else ""
    return f"dequantising takes about {size(model.plain_bytes)} of memory{memory}, and {size(model.plain_bytes)} of disk space{disk}"


def check_space(model: GGUFModel, out: Path, further_bytes: int = 0) -> None:
    """Raise NoSpaceError if the disk of `out` cannot hold the dequantised weights and `further_bytes`."""
    needed = model.plain_bytes + further_bytes
    parent = next(path for path in Path(os.path.realpath(out)).parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise NoSpaceError(
            f"{parent} has {size(free)} free, and dequantising {model.source_id} needs {size(needed)} there: free some space, or name "
            "a folder on another disk"
        )


@contextmanager
def dequantised(model: GGUFModel, out: Path, note: Note) -> Iterator[Checkpoint]:
    """The dequantised checkpoint of a GGUF file, in a hidden folder beside `out`, which is removed at the end.

    After a signal it stays if merged layers of the same result do, which a repeated command needs it for.

    Args:
        model: the file.
        out: the result that is made from it or checked.
        note: called with sentences on what is not as in the file.
    """
    folder = hidden_folder(out)
    state = json.dumps(
        [str(model.file.resolve()), model.file.stat().st_size, model.file.stat().st_mtime_ns, model.dtype, __version__]
    )
    _take_over(folder, out)
    if not (folder / _STATE).is_file() or (folder / _STATE).read_text(encoding="utf-8") != state:
        shutil.rmtree(folder, ignore_errors=True)
        with StagedFolder(folder) as staged:
            from gqa_convert.families.dequantising import write_gguf

            for sentence in write_gguf(model, staged.path):
                note(sentence)
            (staged.path / _STATE).write_text(state, encoding="utf-8")
            staged.publish(overwrite=False)
    handle = _lock(folder, out)
    keep = False
    try:
        opened = open_checkpoint(folder)
        yield replace(opened, source_id=model.source_id, revision=model.revision, dequantised=model.record)
    except InterruptedRunError:
        keep = (folder.parent / folder.name.replace(".gqa-dequantised", ".gqa-merging")).exists()
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _take_over(folder: Path, out: Path) -> None:
    """Check that no other run uses the folder that an earlier one left behind."""
    if folder.exists() and (handle := _lock(folder, out)) is not None:
        os.close(handle)


def _lock(folder: Path, out: Path) -> int | None:
    handle: int | None = None
    with suppress(OSError):  # a filesystem without locks
        handle = lock_folder(folder)
        if handle is None:
            raise OutputError(f"another run is making {out} ({folder} is locked): wait for it, or name another folder")
    return handle
