"""The files that a folder or a pattern stands for, by the conventions of `datasets`; all others are named on stderr."""

import glob
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from gqa_convert.data.files import DOCUMENTS, kind_of
from gqa_convert.errors import DataError
from gqa_convert.runtime.messages import some

TRAIN = "train"
"""The split that is read unless another one is stated."""
_BESIDE_DATA = re.compile(r"state\.json|cache-\w+\.arrow")
"""What `datasets` writes, too, as far as it is not in its own list of files that are no data."""
_SHARD = re.compile(r"(?:data/(.+)|([^/]+)/data)-\d{5}-of-\d{5}.*")
"""A file of `push_to_hub`, or of several splits that `save_to_disk` has written, with the name of its split."""


def data_files(
    given: Path, kinds: Collection[str], split: str = TRAIN, shared: Collection[str] = ()
) -> list[Path]:
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
    if given.is_dir():
        found = [path.relative_to(given) for path in sorted(given.rglob("*")) if path.is_file()]
        unread = {path: _why_unread(path, kinds, shared) for path in found}
        splits = _splits([path for path, reason in unread.items() if not reason])
        stated = sorted(set(splits.values()))
        if len(stated) > 1 or split != TRAIN:
            if split not in stated:
                raise DataError(
                    f"{given} has no split {split}, found {', '.join(stated) or 'none'}: name its files, such as 'data/test*'"
                )
            for path in found:
                if splits.get(path, split if path.name in shared else "") != split:
                    unread[path] = unread[path] or f"not in the split {split}"
    else:
        matching = map(Path, sorted(glob.glob(str(given), recursive=True)))  # noqa: PTH207  # it may begin with /
        unread = {
            path.absolute(): _why_unread(Path(path.name)) for path in matching if path.is_file()
        }
    note_unread(given, unread)
    return [given / path for path, reason in unread.items() if not reason]


def note_unread(given: Path, unread: Mapping[Path, str]) -> None:
    """Name files that are not read, once and in the first process of several.

    Args:
        given: where they are.
        unread: why they are not read; empty for those that are.
    """
    reasons = dict.fromkeys(filter(None, unread.values()))
    parts = [
        f"{some([str(path) for path in unread if unread[path] == reason])} ({reason})"
        for reason in reasons
    ]
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
    return (
        f"no {', '.join(kinds)}"
        if kinds and kind_of(path) not in kinds and path.name not in shared
        else ""
    )


def _splits(paths: Iterable[Path]) -> dict[Path, str]:
    """The splits that names of shards state, or else those of folders, or else those of files."""
    from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS

    data = [path for path in paths if kind_of(path) not in DOCUMENTS]
    found = {
        path: shard[1] or shard[2] for path in data if (shard := _SHARD.fullmatch(path.as_posix()))
    }
    for parts in (slice(None, -1), slice(-1, None)):
        for split, keywords in SPLIT_KEYWORDS.items() if not found else ():
            word = re.compile(
                f"(.*[{NON_WORDS_CHARS}])?({'|'.join(keywords)})([{NON_WORDS_CHARS}].*)?"
            )
            found |= {
                path: str(split) for path in data if any(map(word.fullmatch, path.parts[parts]))
            }
    return found
