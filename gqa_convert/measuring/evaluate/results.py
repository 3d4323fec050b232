"""The file of results."""

import errno
import json
import os
from pathlib import Path

from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.errors import GQAConvertError, NoSpaceError, OutputError
from gqa_convert.measuring.results.schemas import EvaluationFile

_KIND = "evaluate"
_WITHOUT_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""What filesystems and old kernels that lack O_TMPFILE answer."""


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse a file that can't be written, before the evaluation begins.

    Raises:
        OutputError: the file exists (without `overwrite`, or with content other than results), or its folder is
            missing.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder: name a file such as {path / 'results.json'}")
    if path.exists():
        if not _is_ours(path):
            raise OutputError(f"{path} exists already and does not hold results of evaluate: name a new file")
        if not overwrite:
            raise OutputError(f"{path} exists already: name a new file, or replace it with --overwrite")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"the folder {path.absolute().parent} does not exist: make it, or name another file")
    try:  # a file without a name, of which a killed process leaves nothing
        os.close(os.open(path.absolute().parent, os.O_TMPFILE | os.O_WRONLY))
    except OSError as problem:
        if problem.errno not in _WITHOUT_NAMELESS_FILES:
            raise _unwritable(path, problem) from None


def _is_ours(path: Path) -> bool:
    """Whether a file is empty or holds results of evaluate."""
    try:
        raw = path.read_bytes()
        found = json.loads(raw) if raw else {"kind": _KIND}
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("kind") == _KIND


def write_results(path: Path, results: EvaluationFile, *, overwrite: bool) -> None:
    """Write results as JSON: the file appears whole or not at all.

    Raises:
        OutputError: the file exists by now, or can't be written.
        NoSpaceError: the disk is full.
    """
    text = json.dumps(results.as_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    check_output(path, overwrite=overwrite)
    try:
        write_whole(path, text.encode())
    except OSError as problem:
        raise _unwritable(path, problem) from None


def _unwritable(path: Path, problem: OSError) -> GQAConvertError:
    if is_disk_full(problem):
        return NoSpaceError(
            f"the disk or quota of {path} is full: free some space, or name a file on another disk with --output"
        )
    return OutputError(f"{path} can't be written ({problem.strerror or problem}): name another file with --output")
