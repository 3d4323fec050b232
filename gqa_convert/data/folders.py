"""The files that a name stands for: a folder or a pattern, by the conventions of `datasets`, or
Python's standard library.

Files that are not read are named on stderr.
"""

import fnmatch
import glob
import hashlib
import logging
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path

from gqa_convert.errors import DataError
from gqa_convert.runtime.messages import some

from .files import DOCUMENTS, kind_of

HELD_OUT_SHARE = 20
"""One in this many files of the standard library is held out."""
_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test"})

TRAIN = "train"
"""The split that is read unless another one is stated."""
_BESIDE_DATA = re.compile(r"state\.json|cache-\w+\.arrow")
"""What `datasets` writes, too, as far as it is not in its own list of files that are no data."""
_SHARD = re.compile(r"(?:data/(.+)|([^/]+)/data)-\d{5}-of-\d{5}.*")
"""A file of `push_to_hub`, or of several splits that `save_to_disk` has written, with the name of
its split.
"""


def data_files(
    given: Path, kinds: Collection[str], split: str = TRAIN, shared: Collection[str] = ()
) -> list[Path]:
    """The files of one split of a folder, in the order of their paths, or those that match a
    pattern.

    The names of files and folders state splits as they do for `datasets`. A single split is taken
    for a mere name, and all files are read.

    Args:
        given: the folder or the pattern.
        kinds: the suffixes of files that are read from a folder.
        split: of the folder.
        shared: names of files that are read, too, and belong to each split that they don't lie in
            the folder of.

    Raises:
        DataError: the folder has splits, but not this one, or not this one alone.
    """
    if not given.is_dir():
        # the pattern may begin with /, which Path.glob does not take
        matching = map(Path, sorted(glob.glob(str(given), recursive=True)))  # noqa: PTH207
        found = [path for path in matching if path.is_file()]
        unread = {path.absolute(): _why_unread(Path(path.name)) for path in found}
    else:
        found = [path.relative_to(given) for path in sorted(given.rglob("*")) if path.is_file()]
        unread = {path: _why_unread(path, kinds, shared) for path in found}
        splits = _splits([path for path in found if not unread[path]])
        stated = sorted(set(splits.values()))
        is_split = len(stated) > 1 or split != TRAIN
        if is_split and split not in stated:
            raise DataError(
                f"{given} has no split {split}, found {', '.join(stated) or 'none'}: "
                "name its files, such as 'data/test*'"
            )
        for path in found if is_split else ():
            if splits.get(path, split if path.name in shared else "") != split:
                unread[path] = unread[path] or f"not in the split {split}"
    note_unread(given, unread)
    return [given / path for path, reason in unread.items() if not reason]


def note_unread(given: Path, unread: Mapping[Path, str]) -> None:
    """Name files that are not read, once and in the first process of several.

    Args:
        given: where they are.
        unread: why they are not read; empty for those that are.
    """
    by_reason = defaultdict(list)
    for path, reason in unread.items():
        by_reason[reason].append(str(path))
    by_reason.pop("", None)
    parts = [f"{some(paths)} ({reason})" for reason, paths in by_reason.items()]
    if parts and os.environ.get("RANK", "0") == "0":
        _say(f"note: not read in {given}: {'; '.join(parts)}")


@lru_cache
def _say(note: str) -> None:
    logging.getLogger(__name__).warning(note)


def _why_unread(path: Path, kinds: Collection[str] = (), shared: Collection[str] = ()) -> str:
    """Why a file is not read, by its path alone; empty if it is."""
    from datasets.data_files import FILES_TO_IGNORE

    if any(part.startswith(".") for part in path.parts):
        return "hidden"
    if path.name in FILES_TO_IGNORE or _BESIDE_DATA.fullmatch(path.name):
        return "about data, no data"
    is_wanted = not kinds or kind_of(path) in kinds or path.name in shared
    return "" if is_wanted else f"no {', '.join(kinds)}"


def _splits(paths: Iterable[Path]) -> dict[Path, str]:
    """The splits that names of shards state, or else those of folders, or else those of files."""
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

    data = [path for path in paths if kind_of(path) not in DOCUMENTS]
    found = {}
    for path in data:
        if shard := _SHARD.fullmatch(path.as_posix()):
            found[path] = shard[1] or shard[2]
    for parts in (slice(None, -1), slice(-1, None)):
        if found:
            break
        for split, keywords in SPLIT_KEYWORDS.items():
            word = f"(.*[{NON_WORDS_CHARS}])?({'|'.join(keywords)})([{NON_WORDS_CHARS}].*)?"
            is_named = partial(re.fullmatch, word)
            found |= {path: str(split) for path in data if any(map(is_named, path.parts[parts]))}
    return found


# Text that is available on every machine: the source code of the Python standard library


def is_held_out(relative_path: str, share: int = HELD_OUT_SHARE) -> bool:
    """Whether the file at this path (below the standard library, with forward slashes) is held out.

    The demo checkpoint was trained on one part of these files and is evaluated on the other. A file
    belongs to the held-out part by a hash of its path alone, so that training and evaluation agree
    on every Python version without a list of names.
    """
    return hashlib.sha256(relative_path.encode()).digest()[0] % share == 0


def source_files(held_out: bool, with_tests: bool = False) -> list[Path]:
    """The `.py` files of one part of the standard library, in a fixed order.

    Its test suites are optional.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = {*folders} - (_FOREIGN if with_tests else _FOREIGN | _TESTS)
        for name in fnmatch.filter(files, "*.py"):
            path = Path(folder, name)
            if is_held_out(path.relative_to(root).as_posix()) == held_out:
                found.append(path)
    return sorted(found)
