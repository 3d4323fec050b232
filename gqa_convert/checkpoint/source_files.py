"""The weight files of a checkpoint, open for reading byte ranges."""

from contextlib import ExitStack
from pathlib import Path

from gqa_convert.checkpoint.copying import SourceFile
from gqa_convert.checkpoint.shared_blocks import can_share_blocks
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import CorruptCheckpointError


class SourceFiles:
    """The source's weight files by shard number, each opened when it is first used.

    Old `.bin` files whose tensors have no usable offsets are first written out as plain bytes ("spilled").
    """

    def __init__(self, checkpoint: Checkpoint, work: Path, stack: ExitStack) -> None:
        self._checkpoint = checkpoint
        self._work = work
        self._stack = stack
        self._open: dict[int, SourceFile] = {}
        self.shared = self._probe_sharing()
        """Whether output files can share disk blocks with the source."""

    def __getitem__(self, number: int) -> SourceFile:
        if number not in self._open:
            shard = self._checkpoint.shards[number]
            assert self._checkpoint.folder is not None
            path = self._checkpoint.folder / shard.file
            self._check_unchanged(number)
            if shard.spilled:
                from gqa_convert.checkpoint.torch_files import spill

                spilled = self._work / f".spilled-{number}"
                spill(path, spilled)
                self._stack.callback(spilled.unlink)
                path = spilled
            file = SourceFile(path, read_ahead=not self.shared)
            self._stack.callback(file.close)
            self._open[number] = file
        return self._open[number]

    def check_unchanged(self) -> None:
        """Raise CorruptCheckpointError if a file was modified after its header was read."""
        for number in self._open:
            self._check_unchanged(number)

    def _check_unchanged(self, number: int) -> None:
        shard = self._checkpoint.shards[number]
        assert self._checkpoint.folder is not None
        path = self._checkpoint.folder / shard.file
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (shard.size, shard.modified_ns):
            raise CorruptCheckpointError(
                f"{path} has changed since its header was read: do not write to the source during a conversion, and try again"
            )

    def _probe_sharing(self) -> bool:
        if any(shard.spilled for shard in self._checkpoint.shards):
            return False
        assert self._checkpoint.folder is not None
        probe = self._work / ".share-probe"
        with probe.open("wb") as file:  # a killed run may have left one
            shared = can_share_blocks(self._checkpoint.folder / self._checkpoint.shards[0].file, file.fileno())
        probe.unlink()
        return shared
