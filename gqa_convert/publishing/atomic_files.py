"""Files that appear whole or not at all: written under a temporary name, synced, then renamed."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gqa_convert.runtime.json_objects import JsonObject


@contextlib.contextmanager
def atomic_file(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """A context that yields a file to write; `path` is replaced when the context ends without an
    error.

    Args:
        path: of the result.
        temporary: the name until then, in the same folder; by default `.NAME.new`. Processes that
            write the same file at the same time need different names.

    Raises:
        OSError: the file can't be written; `path` keeps its content, and the temporary file is
            removed.
    """
    temporary = temporary or path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file's content in one step."""
    with atomic_file(path) as file:
        file.write(content)


def write_json(path: Path, value: JsonObject) -> None:
    """Replace a file with indented JSON in one step; half a surrogate pair is written as JSON
    escapes it.
    """
    write_whole(
        path,
        (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(
            "utf-8", "backslashreplace"
        ),
    )


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk; some filesystems refuse to sync
    folders.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)
