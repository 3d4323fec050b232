"""Links in a checkpoint's folder: those that lead out of it do not count as its files.

The rule repeats the converter's on purpose: a link that the converter follows by mistake must not pass here.
"""

from pathlib import Path


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path is a link to anything but a visible file of its folder, or a blob of the same repository in the
    Hub's cache.
    """
    if not path.is_symlink():
        return False
    target, home = path.resolve(), folder.resolve()
    if target.is_relative_to(home):
        return any(part.startswith(".") for part in target.relative_to(home).parts)
    caches = [parent.parent for parent in home.parents if parent.name == "snapshots"]
    return target.parent not in [(cache / "blobs").resolve() for cache in caches]
