"""Conversions whose weight files are written by several processes, on one host or on many that share a disk.

The finished files wait in a hidden folder beside the result, where any later run of the same conversion finds them; so a
killed process costs its unfinished files alone. The process that finds the last file publishes the result, whole.
"""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert._version import __version__
from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.locks import wait_for_lock
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.conversion.plan import OutputShard, Plan
from gqa_convert.conversion.writing import Progress, write_weights
from gqa_convert.errors import OptionError, OutputError
from gqa_convert.families.target_architectures import TargetArchitecture
from gqa_convert.merging.methods import CHOICES, names

_PLAN = "plan.json"
_RECORD = ".json"
"""Behind the name of a finished weight file: the file of its merge errors."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which of `count` parts of the weight files, counted from 1."""

    number: int
    count: int

    def check(self, shards: Sequence[OutputShard]) -> None:
        """Refuse more parts than there are files, of which some would have nothing to write.

        Raises:
            OptionError: there are fewer files.
        """
        if self.count > len(shards):
            raise OptionError(
                f"--part {self.number}/{self.count} of {len(shards)} weight files: divide them into at most {len(shards)} "
                "parts, or make more files with --max-shard-size"
            )

    def of(self, shards: Sequence[OutputShard]) -> tuple[OutputShard, ...]:
        """Every `count`-th file."""
        return tuple(shards[self.number - 1 :: self.count])


@dataclass(frozen=True, slots=True)
class _OneFile:
    """A plan to write one weight file."""

    checkpoint: Checkpoint
    shards: tuple[OutputShard, ...]
    target_architecture: TargetArchitecture | None
    seed: int

    @property
    def disk_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def check_divisible(plan: Plan, option: str) -> None:
    """Refuse a plan whose weight files cannot be written independently of one another.

    Args:
        plan: of the conversion.
        option: that asks for it.

    Raises:
        OptionError: layers are merged one after another, or the source is made anew by every command.
    """
    if plan.merge_method.merges_layers:
        alone = names(tuple(method for method in CHOICES if not method.merges_layers))
        raise OptionError(
            f"{option} with --method {plan.method}: its layers are merged one after another by one process, so leave the "
            f"option out, or choose one of {alone}"
        )
    if plan.checkpoint.dequantised is not None:
        raise OptionError(
            f"{option} with a GGUF file, which every process would dequantise anew: make a checkpoint of it with "
            "gqa-convert restate first"
        )


class PartsFolder:
    """The hidden folder of the finished weight files of a conversion.

    Args:
        out: the folder of the result.
        plan: of the conversion, of a local checkpoint; it must be that of all who share the folder.
    """

    def __init__(self, out: Path, plan: Plan) -> None:
        out = Path(os.path.realpath(out))
        self.path = out.parent / f".{out.name}.gqa-convert-parts"
        self._plan = plan

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """A context that one process at a time is in; yields whether the folder is still there."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(wait_for_lock(self.path / ".lock"))
            except FileNotFoundError:
                yield False
            else:
                yield self.path.exists()

    def open(self) -> None:
        """Make the folder, or check that it is of the same plan.

        Raises:
            OutputError: it is of another plan.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        stated = json.dumps(weights_fingerprint(self._plan))
        own = self.path / f".{secrets.token_hex(4)}"
        own.write_text(stated, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            _link(own, self.path / _PLAN)  # the first process states the plan
        own.unlink(missing_ok=True)
        if (self.path / _PLAN).read_text(encoding="utf-8") != stated:
            raise OutputError(
                f"{self.path} holds parts of another conversion (other options, or a source that changed): repeat that "
                "one, or delete the folder"
            )

    def missing(self, shards: Sequence[OutputShard]) -> tuple[OutputShard, ...]:
        """The files of `shards` that are not finished."""
        return tuple(shard for shard in shards if not self._record(shard).is_file())

    def write(self, shard: OutputShard, progress: Progress) -> None:
        """Write one file, under another name until it is whole.

        Args:
            shard: of the plan.
            progress: called with every number of bytes written.
        """
        work = self.path / f".work-{secrets.token_hex(4)}"
        work.mkdir()
        try:
            plan = self._plan
            errors = write_weights(
                _OneFile(plan.checkpoint, (shard,), plan.target_architecture, plan.seed), work, progress
            )
            (work / "record").write_text(json.dumps(errors), encoding="utf-8")
            (work / shard.file).replace(self.path / shard.file)
            (work / "record").replace(self._record(shard))
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def errors(self) -> dict[str, float]:
        """The merge errors of all files, in the order of the plan."""
        found: dict[str, float] = {}
        for shard in self._plan.shards:
            found |= json.loads(self._record(shard).read_text(encoding="utf-8"))
        return found

    def link_into(self, folder: Path) -> None:
        """Give the finished files second names in a folder, so that they are still here if it does not come to be."""
        for shard in self._plan.shards:
            _link(self.path / shard.file, folder / shard.file)
        sync(folder)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _record(self, shard: OutputShard) -> Path:
        return self.path / f"{shard.file}{_RECORD}"


def _link(old: Path, new: Path) -> None:
    """Give a file a second name, or another name where the filesystem has no links."""
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:
        if new.exists():
            raise FileExistsError(new) from None
        old.rename(new)


def weights_fingerprint(plan: Plan) -> dict[str, Any]:
    """What the bytes of weight files depend on."""
    checkpoint = plan.checkpoint
    remote = checkpoint.revision is not None
    return {
        "version": __version__,
        "source": checkpoint.source_id if remote else str(checkpoint.folder),
        "revision": checkpoint.revision,
        "files": [[shard.file, shard.size] for shard in checkpoint.shards],
        "modified_ns": None if remote else [shard.modified_ns for shard in checkpoint.shards],
        "method": plan.method,
        "seed": plan.seed,
        "groups": plan.stated_groups,
        "changed": [change.name for change in plan.changes],
        "config": plan.config,
        "result": [[shard.file, shard.nbytes] for shard in plan.shards],
    }
