"""Keeps measured divergences in a file beside the result, so that a repeated command does not measure them again."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gqa_convert._version import __version__
from gqa_convert.checkpoint.atomic_files import write_whole
from gqa_convert.conversion.plan import Plan

Copy = Mapping[str, int]
"""A copy of the source: the number of K/V heads of each merged layer by the layer's module; other layers are the source's."""


class KeptDivergences:
    """The divergences that were measured, by copy and by the number of held-out batches.

    Args:
        out: the folder of the result, beside which a hidden file keeps them; None to keep them in memory alone.

    Attributes:
        fingerprint: what the divergences depend on, once they are opened.
    """

    def __init__(self, out: Path | None) -> None:
        real = None if out is None else Path(os.path.realpath(out))
        self.path = None if real is None else real.parent / f".{real.name}.gqa-budget.json"
        self.fingerprint = ""
        self._known: dict[str, float] = {}

    def open(self, plan: Plan, digest: str, merging: str) -> None:
        """Take the divergences of an earlier run of the same source on the same text.

        Args:
            plan: of the source.
            digest: of the text.
            merging: how layers are merged.
        """
        checkpoint = plan.checkpoint
        depends_on = {
            "version": __version__,
            "source": str(checkpoint.folder),
            "files": [[shard.file, shard.size, shard.modified_ns] for shard in checkpoint.shards],
            "config": checkpoint.config,
            "text": digest,
            "merging": merging,
        }
        self.fingerprint, self._known = json.dumps(depends_on, sort_keys=True), {}
        content = self._read()
        if content.get("fingerprint") == self.fingerprint:
            kept = content.get("divergences", {})
            self._known = {key: math.inf if kl is None else kl for key, kl in kept.items()}

    def find(self, copy: Copy, batches: int | None) -> float | None:
        """The divergence of a copy on so many held-out batches (None for all); None if it was not measured."""
        return self._known.get(_key(copy, batches))

    def add(self, copies: Sequence[Copy], batches: int | None, divergences: Sequence[float]) -> None:
        """Keep what was measured. Once this returns, a kill cannot lose it."""
        self._known |= {_key(copy, batches): kl for copy, kl in zip(copies, divergences, strict=True)}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            finite = {key: kl if math.isfinite(kl) else None for key, kl in self._known.items()}
            content = {"fingerprint": self.fingerprint, "divergences": finite}
            write_whole(self.path, json.dumps(content).encode())

    def discard(self) -> None:
        """Remove the file, which a finished conversion no longer needs."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            content = {} if self.path is None else json.loads(self.path.read_bytes())
        except (OSError, ValueError):  # absent, or damaged by something else: measured again
            return {}
        return content if isinstance(content, dict) else {}


def _key(copy: Copy, batches: int | None) -> str:
    return json.dumps([dict(copy), batches], sort_keys=True)
