"""Hub datasets as streams of documents, and the commits that they are read at."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from gqa_convert.errors import DataError, GQAConvertError, first_line

from .files import Fields, Piece, columns_of

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubDataset:
    """A Hub dataset as a stream of documents, which may never end.

    Attributes:
        label: its id.
        commit: of the repository.
        name: of the configuration.
        split: that is read.
    """

    label: str
    commit: str
    name: str | None
    split: str
    is_stream: ClassVar[bool] = True

    def identity(self) -> list[Any]:
        """Everything that the documents depend on, as plain data for a cache key."""
        return ["hub", self.label, self.commit, self.name, self.split]

    def open_rows(self) -> Any:
        """The rows, as `datasets` streams them. It opens a broken connection again itself.

        Raises:
            DataError: the dataset, configuration or split does not exist.
        """
        import datasets

        try:
            return datasets.load_dataset(
                self.label, name=self.name, split=self.split, revision=self.commit, streaming=True
            )
        except Exception as problem:
            raise DataError(
                f"the dataset {self.label} can't be opened ({first_line(problem)}): check its "
                "name, configuration and split"
            ) from problem

    def pieces(self, fields: Fields) -> Iterator[Piece]:
        """The documents.

        Args:
            fields: the fields of the rows.

        Raises:
            DataError: the dataset can't be read, or a row lacks a field.
        """
        rows = self.open_rows()
        if columns := columns_of(fields.names, getattr(rows, "column_names", None) or ()):
            rows = rows.select_columns(columns)
        number = 0
        try:
            for number, row in enumerate(rows, 1):
                where = f"{self.label} row {number}"
                if document := fields.read(row, where):
                    yield Piece(document, where=where)
        except GQAConvertError:
            raise
        except Exception as problem:
            reason = str(problem) or type(problem).__name__
            raise DataError(
                f"the stream of {self.label} was interrupted after {number} rows ({reason}): "
                "check the network and run the same command again, which continues"
            ) from problem


def commit_of(dataset: str, revision: str | None) -> str:
    """The commit of a dataset's revision.

    Args:
        dataset: its id.
        revision: branch, tag or commit.

    Raises:
        DataError: the dataset or revision does not exist, or the Hub can't be reached.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return str(huggingface_hub.HfApi().dataset_info(dataset, revision=revision, timeout=30).sha)
    except Exception as problem:
        reason = (
            f"the Hub has no dataset with the revision {revision or 'main'} that you can access: "
            "check both, or log in"
        )
        if not isinstance(problem, RepositoryNotFoundError | RevisionNotFoundError):
            reason = (
                "the Hub could not be reached to look for a dataset of this name "
                f"({first_line(problem)}): check the path or the network"
            )
        raise DataError(f"{dataset} is not a local file, and {reason}") from problem
