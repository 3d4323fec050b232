"""Hub datasets as streams of rows."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.errors import DataError, GQAConvertError
from gqa_convert.text.documents import Columns, pair_columns

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubText:
    """A Hub dataset as a stream of rows.

    Attributes:
        label: its id.
        commit: of the repository.
        columns: the columns that hold the documents.
    """

    label: str
    commit: str
    name: str | None
    split: str
    columns: Columns

    def identity(self) -> list[Any]:
        """Everything that the documents depend on, as plain data for a cache key."""
        return ["hub", self.label, self.commit, self.name, self.split, self.columns.identity()]

    def rows(self, fields: Sequence[str] = ()) -> Iterable[Mapping[str, Any]]:
        """The rows, as `datasets` streams them.

        Args:
            fields: the fields of pairs; if empty, the columns of the documents are read.

        Raises:
            DataError: the dataset, configuration, split or column does not exist.
        """
        import datasets

        try:
            rows: Any = datasets.load_dataset(
                self.label, name=self.name, split=self.split, revision=self.commit, streaming=True
            )
        except Exception as problem:
            raise DataError(
                f"the dataset {self.label} can't be opened ({problem}): check its name, configuration and split"
            ) from problem
        if not rows.column_names:
            return rows  # type: ignore[no-any-return]
        if fields:
            return rows.select_columns(pair_columns(self.label, fields, rows.column_names))  # type: ignore[no-any-return]
        return rows.select_columns(self.columns.columns(self.label, rows.column_names))  # type: ignore[no-any-return]


def numbered_rows(text: HubText, fields: Sequence[str] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The location of each row, for messages, and the row, in order.

    Raises:
        DataError: see `HubText.rows`; or the stream was interrupted.
    """
    number = 0
    try:
        for number, row in enumerate(text.rows(fields), 1):
            yield f"{text.label} row {number}", row
    except GQAConvertError:
        raise
    except Exception as problem:
        reason = str(problem) or type(problem).__name__
        raise DataError(
            f"the stream of {text.label} was interrupted after {number} rows ({reason}): check the network and run the command again"
        ) from problem


def commit_of(dataset: str, revision: str | None, memory: Path, *, ask: bool) -> str:
    """The commit of a dataset's revision, or the last known one if the Hub can't be reached.

    Args:
        dataset: its id.
        revision: branch, tag or commit.
        memory: the folder that remembers commits.
        ask: query the Hub even if a commit is remembered.

    Raises:
        DataError: the dataset or revision does not exist, or the Hub can't be reached and no commit is known.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    name = f"{dataset}@{revision or 'main'}".replace("/", "--")
    known = memory / f"{name}.commit"
    if not ask and known.is_file():
        return known.read_text(encoding="utf-8").strip()
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
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise DataError(
            f"{dataset} is not a local file, and the Hub could not be reached to look for a dataset of this name ({reason}): check the path or the network"
        ) from problem
    with suppress(OSError):  # only a later offline run needs it
        memory.mkdir(parents=True, exist_ok=True)
        known.write_text(commit, encoding="utf-8")
    return commit
