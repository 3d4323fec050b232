"""The check on SHA-256 hashes, which finds changes that no other check can see."""

import hashlib
from pathlib import Path
from typing import Any

from gqa_convert.verify.report import Failure, Finding


def file_sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hashes(out: Path, result: Any) -> Finding:
    """OUT's weight files are those that were written.

    Args:
        out: OUT's folder.
        result: the entry `result` of OUT's provenance record.
    """
    files = result.get("files") if isinstance(result, dict) else None
    if not isinstance(files, dict):
        raise Failure(f"the provenance record claims result = {result!r}, which lists no files")
    for name, stated in files.items():
        if not isinstance(stated, dict) or not (out / name).is_file():
            raise Failure(f"the provenance record claims {stated!r} for {name}, which is missing or has no hash")
        if stated.get("sha256") != (found := file_sha256(out / name)):
            raise Failure(
                f"{name} has SHA-256 {found}, expected {stated.get('sha256')}: it has changed since it was written"
            )
    unlisted = sorted({path.name for path in out.glob("*.safetensors")} - set(files))
    if unlisted:
        raise Failure(f"the provenance record has no hash of {unlisted[0]} ({len(unlisted)} weight files without one)")
    return Finding(f"{len(files)} weight file(s) as they were written", {"files": len(files)})
