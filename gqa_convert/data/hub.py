"""Hub datasets as streams of documents, and the commits that they are read at."""

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.paths import cache_folder
from gqa_convert.data.documents import Fields, Piece
from gqa_convert.data.files import columns_of
from gqa_convert.errors import DataError, GQAConvertError

_COMMIT = re.compile(r"[0-9a-f]{40}")


def default_cache() -> Path:
    """The default folder of token files, and of the commits of datasets that they were made of."""
    return cache_folder() / "tokens"


class HubDataset:
    """A Hub dataset as a stream of documents, which may never end.

    Attributes:
        label: its id.
        commit: of the repository.
    """

    is_stream = True

    def __init__(self, label: str, commit: str, name: str | None, split: str) -> None:
        self.label, self.commit, self._name, self._split = label, commit, name, split
        self._rows: Any = None
        self._number = 0

    def identity(self) -> list[Any]:
        """Everything that the documents depend on, as plain data for a cache key."""
        return ["hub", self.label, self.commit, self._name, self._split]

    def open_rows(self) -> Any:
        """The rows, as `datasets` streams them. It opens a broken connection again itself.

        Raises:
            DataError: the dataset, configuration or split does not exist.
        """
        import datasets

        try:
            return datasets.load_dataset(
                self.label, name=self._name, split=self._split, revision=self.commit, streaming=True
            )
        except Exception as problem:
            raise DataError(
                f"the dataset {self.label} can't be opened ({problem}): check its name, configuration and split"
            ) from problem

    def pieces(self, fields: Fields, skip: int = 0, position: Any = None) -> Iterator[Piece]:
        """The documents.

        Args:
            fields: the fields of the rows.
            skip: the documents at the beginning that are left out.
            position: where those end, as `position` returned it; None if it is not known.

        Raises:
            DataError: the dataset can't be read, or a row lacks a field.
        """
        rows = self.open_rows()
        if columns := columns_of(fields.names, getattr(rows, "column_names", None) or ()):
            rows = rows.select_columns(columns)
        self._rows, self._number = rows, 0
        if position is not None:
            self._number, state = position
            rows.load_state_dict(state)
            skip = 0
        return islice(self._pieces(fields), skip, None)

    def _pieces(self, fields: Fields) -> Iterator[Piece]:
        try:
            for row in self._rows:
                self._number += 1
                where = f"{self.label} row {self._number}"
                if document := fields.read(row, where):
                    yield Piece(document, where=where)
        except GQAConvertError:
            raise
        except Exception as problem:
            reason = str(problem) or type(problem).__name__
            raise DataError(
                f"the stream of {self.label} was interrupted after {self._number} rows ({reason}): check the network and run the same command "
                "again, which continues"
            ) from problem

    def position(self) -> Any:
        """Where the next document begins, as plain data; None where the dataset doesn't tell."""
        if not hasattr(self._rows, "state_dict"):
            return None
        return [self._number, self._rows.state_dict()]


def commit_of(dataset: str, revision: str | None) -> str:
    """The commit of a dataset's revision, or the last known one if the Hub can't be reached.

    Args:
        dataset: its id.
        revision: branch, tag or commit.

    Raises:
        DataError: the dataset or revision does not exist, or the Hub can't be reached and no commit is known.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    name = f"{dataset}@{revision or 'main'}".replace("/", "--")
    known = default_cache() / f"{name}.commit"
    try:
        commit = str(huggingface_hub.HfApi().dataset_info(dataset, revision=revision, timeout=30).sha)
    except RevisionNotFoundError:
        raise DataError(
            f"the dataset {dataset} has no revision {revision!r}: check the branch, tag or commit"
        ) from None
    except RepositoryNotFoundError:
        raise DataError(
            f"{dataset} is neither a local file nor a Hub dataset that you can access: check the name, or log in"
        ) from None
    except Exception as problem:
        if known.is_file():
            return known.read_text(encoding="utf-8").strip()
        reason = str(problem).split("\n")[0] or type(problem).__name__
        raise DataError(
            f"{dataset} is not a local file, and the Hub could not be reached to look for a dataset of this name ({reason}): check the path or the network"
        ) from problem
    with suppress(OSError):  # only a later offline run needs it
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(commit, encoding="utf-8")
    return commit
