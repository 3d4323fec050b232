"""Tokenises the parts of a text, each into a file of its own, in this process or in several."""

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gqa_convert.errors import DeviceMemoryError
from gqa_convert.text.file_parts import Part, parts_of, pieces_of
from gqa_convert.text.text_files import FileText
from gqa_convert.text.token_files import Progress, open_token_file, write_token_file
from gqa_convert.text.tokenizing import Encoder, batches

_LOOK = 0.5  # seconds


def tokenize_parts(text: FileText, encoder: Encoder, folder: Path, progress: Progress, processes: int) -> list[Path]:
    """Tokenise the parts of a text that are not in the folder yet.

    Args:
        text: the files.
        encoder: the tokenizer.
        folder: the folder of the parts' files.
        progress: called with the source, the bytes tokenised and their total.
        processes: how many processes tokenise.

    Returns:
        The files of the parts, in the order of the text.

    Raises:
        DataError: the text can't be read, or a process ended.
    """
    groups = parts_of(text)
    paths = [folder / f"{number:06d}.tokens" for number in range(len(groups))]
    missing = [number for number, path in enumerate(paths) if open_token_file(path) is None]
    done = sum(_bytes(group) for group in groups) - sum(_bytes(groups[number]) for number in missing)
    if processes > 1 and len(missing) > 1:
        _in_processes(text, encoder, paths, progress, min(processes, len(missing)), missing, done)
    else:
        for number in missing:

            def report(nbytes: int, before: int = done) -> None:
                progress(text.label, before + nbytes, text.total_bytes)

            done += _tokenize(text, encoder, groups[number], paths[number], report)
            progress(text.label, done, text.total_bytes)
    return paths


def _bytes(group: Sequence[Part]) -> int:
    return sum(part.nbytes for part in group)


def _tokenize(
    text: FileText,
    encoder: Encoder,
    group: Sequence[Part],
    path: Path,
    report: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Tokenise a group of parts into a file; returns the bytes that were read.

    Args:
        text: the files.
        encoder: the tokenizer.
        group: the parts.
        path: the file to write.
        report: called after each batch with the bytes read so far, estimated from the characters.
    """

    def write(file: BinaryIO) -> dict[str, Any]:
        digest, count, documents, begins, characters = hashlib.sha256(), 0, 0, group[0].begins, 0
        for batch in batches(pieces_of(text, group)):
            tokens, ended = encoder.encode(batch, begins=begins)
            begins = batch[-1].last
            data = tokens.tobytes()
            file.write(data)
            digest.update(data)
            count, documents = count + len(tokens), documents + ended
            characters += sum(len(piece.text) for piece in batch)
            report(min(characters, _bytes(group)))
        return {"dtype": encoder.dtype.name, "tokens": count, "documents": documents, "sha256": digest.hexdigest()}

    write_token_file(path, write)
    return _bytes(group)


_work: tuple[FileText, Encoder, list[tuple[Part, ...]], list[Path]]
"""What a process of the pool works on."""


def _start(text: FileText, encoder: Encoder, paths: list[Path]) -> None:
    """Prepare a process of the pool. Stopping is the business of the process that started it."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _work = text, encoder, parts_of(text), paths


def _do(number: int) -> int:
    text, encoder, groups, paths = _work
    return _tokenize(text, encoder, groups[number], paths[number])


def _in_processes(
    text: FileText,
    encoder: Encoder,
    paths: list[Path],
    progress: Progress,
    processes: int,
    missing: list[int],
    done: int,
) -> None:
    """Tokenise groups in a pool of processes; if this process is stopped, so are they."""
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    with _without_threads():
        pool = ProcessPoolExecutor(processes, context, _start, (text, encoder, paths))
        try:
            waiting: set[Future[int]] = {pool.submit(_do, number) for number in missing}
            while waiting:
                ready, waiting = wait(waiting, timeout=_LOOK, return_when=FIRST_COMPLETED)
                for each in ready:
                    done += each.result()
                    progress(text.label, done, text.total_bytes)
            pool.shutdown()
        except BaseException as problem:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            if isinstance(problem, BrokenProcessPool):
                raise DeviceMemoryError(
                    f"a process that tokenised {text.label} was killed, perhaps for lack of memory: run the same command again with fewer "
                    "processes, which keeps the parts that are ready"
                ) from None
            raise


@contextmanager
def _without_threads() -> Iterator[None]:
    """A context in which tokenizers use no threads, of which the processes of the pool would have too many."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
