"""The files that a folder or a pattern stands for, by the conventions of `datasets`; all others are named on stderr."""

import glob
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from gqa_convert.checkpoint.ownership import some
from gqa_convert.data.files import DOCUMENTS, kind_of
from gqa_convert.errors import DataError

TRAIN = "train"
"""The split that is read unless another one is stated."""
_ABOUT_DATA = re.compile(r"state\.json|cache-\w+\.arrow")
"""What `datasets` writes beside data, as far as it is not in its own list of files that are no data."""
_SHARD = re.compile(r"data/(.+)-\d{5}-of-\d{5}.*")


def data_files(given: Path, kinds: Collection[str], split: str = TRAIN, shared: Collection[str] = ()) -> list[Path]:
    """The files of one split of a folder, in the order of their paths, or those that match a pattern.

    The names of files and folders state splits as they do for `datasets`. A single split is taken for a mere name, and
    all files are read.

    Args:
        given: the folder or the pattern.
        kinds: the suffixes of files that are read from a folder.
        split: of the folder.
        shared: names of files that are read, too, and belong to each split that they don't lie in the folder of.

    Raises:
        DataError: the folder has splits, but not this one, or not this one alone.
    """
    is_folder = given.is_dir()
    if is_folder:
        paths = sorted(given.rglob("*"))
    else:
        paths = [Path(name) for name in sorted(glob.glob(str(given), recursive=True))]  # noqa: PTH207  # may begin with /
    unread: dict[str, list[str]] = {}
    found: dict[str, Path] = {}
    for path in paths:
        if path.is_file():
            name = path.relative_to(given).as_posix() if is_folder else path.name
            reason = _why_unread(name)
            if not reason and is_folder and kind_of(path) not in kinds and path.name not in shared:
                reason = f"no {', '.join(kinds)}"
            if reason:
                unread.setdefault(reason, []).append(name)
            else:
                found[name] = path
    splits = _splits([name for name, path in found.items() if is_folder and kind_of(path) not in DOCUMENTS])
    stated = sorted(set(splits.values()))
    if len(stated) > 1 or split != TRAIN:
        if split not in stated:
            raise DataError(
                f"{given} has no split {split}, found {', '.join(stated) or 'none'}: name the files of one, such as 'data/test*'"
            )
        # every file is of one split or shared by all
        others = [
            name for name, path in found.items() if splits.get(name, split if path.name in shared else "") != split
        ]
        unread[f"not in the split {split}"] = others
        for name in others:
            del found[name]
    note_unread(given, unread)
    return [*found.values()]


def note_unread(given: Path, unread: Mapping[str, Sequence[str]]) -> None:
    """Name files that are not read, by reasons, once and in the first process of several."""
    parts = [f"{some(names)} ({reason})" for reason, names in unread.items() if names]
    if parts and os.environ.get("RANK", "0") == "0":
        _say(f"note: not read in {given}: {'; '.join(parts)}")


@lru_cache
def _say(note: str) -> None:
    logging.getLogger(__name__).warning(note)


def _why_unread(name: str) -> str:
    """Why a file is not read, by its path alone; empty if it is."""
    from datasets.data_files import FILES_TO_IGNORE

    *_, last = parts = name.split("/")
    if any(part.startswith(".") for part in parts):
        return "hidden"
    return "about data, no data" if last in FILES_TO_IGNORE or _ABOUT_DATA.fullmatch(last) else ""


def _splits(names: Sequence[str]) -> dict[str, str]:
    """The splits that names of shards state, or else those of folders, or else those of files: by name of the file."""
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

    found = {name: shard[1] for name in names if (shard := _SHARD.fullmatch(name))}
    for parts in (slice(None, -1), slice(-1, None)):
        for split, keywords in SPLIT_KEYWORDS.items() if not found else ():
            word = re.compile(f"(.*[{NON_WORDS_CHARS}])?({'|'.join(keywords)})([{NON_WORDS_CHARS}].*)?")
            found |= {name: str(split) for name in names if any(map(word.fullmatch, name.split("/")[parts]))}
    return found
