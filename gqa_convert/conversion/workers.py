"""Processes that write the weight files of one conversion, each of them some."""

import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

from gqa_convert.conversion.parts import PartsFolder
from gqa_convert.conversion.plan import OutputShard
from gqa_convert.conversion.writing import Progress
from gqa_convert.errors import GQAConvertError, WorkerError

_Message = int | GQAConvertError | OSError | None
"""Bytes that were written, what went wrong, or None at the end."""


def write_by_workers(parts: PartsFolder, shards: Sequence[OutputShard], workers: int, progress: Progress) -> None:
    """Write files with several processes; none is left running.

    Args:
        parts: where to.
        shards: what.
        workers: the number of processes, at most.
        progress: called with every number of bytes that one of them wrote.

    Raises:
        WorkerError: a process was killed.
        GQAConvertError: what a process met with.
    """
    context = multiprocessing.get_context("fork")  # a plan takes longer to send than a process to start
    running: dict[Connection, multiprocessing.process.BaseProcess] = {}
    try:
        for own in _divided(shards, workers):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_write, args=(parts, own, writer, [*running, reader]), daemon=True)
            process.start()
            writer.close()
            running[reader] = process
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                if _finished(ready, running[ready], parts, progress):
                    running.pop(ready).join()
    finally:
        for left in running.values():
            left.terminate()
        for left in running.values():
            left.join()


def _divided(shards: Sequence[OutputShard], workers: int) -> list[list[OutputShard]]:
    """The files of each worker, the largest first to the one with the fewest bytes."""
    divided: list[list[OutputShard]] = [[] for _ in range(min(workers, len(shards)))]
    for shard in sorted(shards, key=lambda each: -each.nbytes):
        min(divided, key=lambda own: sum(each.nbytes for each in own)).append(shard)
    return divided


def _finished(
    reader: Connection, process: multiprocessing.process.BaseProcess, parts: PartsFolder, progress: Progress
) -> bool:
    """Read a worker's next message; return whether it was the last."""
    try:
        message: _Message = reader.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise WorkerError(
            f"a process that wrote weight files {how}: repeat the command, which goes on from the finished files in {parts.path}"
        ) from None
    if isinstance(message, Exception):
        raise message
    if message is not None:
        progress(message)
    return message is None


def _write(
    parts: PartsFolder, shards: Sequence[OutputShard], writer: Connection, inherited: Sequence[Connection]
) -> None:
    for reader in inherited:
        reader.close()  # only the parent's is left, so that its death breaks the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        for shard in shards:
            parts.write(shard, writer.send)
        writer.send(None)
    except BrokenPipeError:  # the parent was killed
        return
    except (GQAConvertError, OSError) as problem:
        writer.send(problem)
