"""A file of generated rows that appears whole, and the hidden file beside it that keeps finished batches until then."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from gqa_convert.checkpoint.atomic_files import atomic_file
from gqa_convert.checkpoint.locks import try_lock
from gqa_convert.checkpoint.resource_errors import is_disk_full
from gqa_convert.errors import NoSpaceError, OutputError

Row = dict[str, Any]


class GeneratedRows:
    """The finished batches of a run. Each is a line of the hidden file, which is written at once and synced, so that a
    killed run loses one batch at most.

    Args:
        out: the result, a file of JSON lines.
        settings: everything that the rows depend on; a run with others does not continue the file.

    Attributes:
        rows: the rows of the finished batches.
        batches: how many batches are finished.
        tokens: their tokens.

    Raises:
        OutputError: the file can't be written, or another run writes it.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out = out
        self.rows, self.batches, self.tokens = list[Row](), 0, 0
        self._part = out.with_name(f".{out.name}.unfinished")
        with self._explained():
            lock = try_lock(self._part)
        if lock is None:
            raise OutputError(f"another run is writing {out}: wait for it")
        self._file = os.fdopen(lock, "r+b")
        header = (json.dumps(settings, sort_keys=True) + "\n").encode()
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        kept = self._read(lines[1:]) if lines and lines[0] == header else 0
        with self._explained():
            self._file.truncate(len(header) + kept if kept else 0)
            self._file.seek(0, os.SEEK_END)
            if not kept:
                self._file.seek(0)
                self._write(header)

    def _read(self, lines: list[bytes]) -> int:
        """Take up the finished batches; returns their bytes."""
        kept = 0
        for line in lines:
            if not line.endswith(b"\n"):
                break
            try:
                batch = json.loads(line)
            except ValueError:
                break
            self._count(batch["rows"], batch["tokens"])
            kept += len(line)
        return kept

    def _count(self, rows: list[Row], tokens: int) -> None:
        self.rows += rows
        self.batches += 1
        self.tokens += tokens

    def add(self, rows: list[Row], tokens: int) -> None:
        """Keep a finished batch.

        Raises:
            NoSpaceError: the disk is full.
        """
        with self._explained():
            self._write((json.dumps({"rows": rows, "tokens": tokens}, ensure_ascii=False) + "\n").encode())
        self._count(rows, tokens)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Write the result, and remove the hidden file.

        Raises:
            NoSpaceError: the disk is full; the batches are kept.
        """
        with self._explained(), atomic_file(self.out) as file:
            file.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in self.rows)
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.batches:
            self._part.unlink(missing_ok=True)
        self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            if is_disk_full(problem):
                raise NoSpaceError(
                    f"the disk of {self.out} is full: make room and run the same command again, which continues after the last batch"
                ) from None
            raise OutputError(f"{self.out} can't be written ({problem.strerror or problem})") from None
