"""Sources of text: local files, Hub datasets, and Python's standard library.

Files are read once, from beginning to end; a Hub dataset is a stream of rows that may never end.
"""

import glob
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.errors import DataError
from gqa_convert.text.chat_encoding import LossOn
from gqa_convert.text.chats import ChatColumns
from gqa_convert.text.documents import Columns, TextColumn
from gqa_convert.text.hub_rows import HubText, commit_of
from gqa_convert.text.keys import CONFIG, PathText, Real, Text, Tokens, Whole, fields_of, key, read_keys
from gqa_convert.text.own_text import SELF, is_self
from gqa_convert.text.own_text import TOKENS as OWN_TOKENS
from gqa_convert.text.stdlib_text import source_files
from gqa_convert.text.text_files import SUFFIXES, FileText, kind_of

STDLIB = "python-stdlib"
HELD_OUT = "python-stdlib:held-out"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, config=CONFIG)
class Source:
    """Where text comes from, as a recipe states it."""

    source: PathText = key(
        "A file, a folder, a pattern with `*`, the id of a Hub dataset, or `python-stdlib` (the sources of this Python; "
        "`python-stdlib:held-out` is the held-out part), or `self` for [text of the source itself](#text-of-the-model-itself).",
        aliases=("path",),
    )
    weight: Real = key("The share of the samples, relative to the weights of the other sources.", default=1.0, gt=0)
    text_field: Text = key(
        "The field or column that holds the text, in JSON lines, JSON arrays, Parquet files and Hub datasets.",
        default="text",
        aliases=("column",),
    )
    split: Text = key("The split of a Hub dataset.", default="train")
    name: Text | None = key("The configuration of a Hub dataset.", default=None, aliases=("dataset_config", "subset"))
    revision: Text | None = key("The branch, tag or commit of a Hub dataset.", default=None)
    source_field: Text | None = key(
        "For pairs of texts: the field of what the encoder reads. `translation.en` is the entry `en` of the field "
        "`translation`.",
        default=None,
        aliases=("source_column", "input_field"),
    )
    target_field: Text | None = key(
        "For pairs of texts: the field of what the decoder learns to write.",
        default=None,
        aliases=("target_column", "label_field"),
    )
    format: Literal["auto", "text", "chat"] = key(
        "`text` is running text, `chat` conversations; see [conversations](#conversations). `auto` is `chat` for files "
        "whose first row has `messages_field` and no `text_field`.",
        default="auto",
    )
    messages_field: Text = key(
        "For conversations: the field of the list of messages, which have `role` and `content`, or `from` and `value`.",
        default="messages",
        aliases=("conversations", "messages_column"),
    )
    loss_on: LossOn = key(
        "For conversations: the tokens that are learned, those of the assistant or all.", default="assistant"
    )
    tokens: Tokens = key("For `self`: how many tokens the source generates.", default=OWN_TOKENS, ge=1)
    temperature: Real = key("For `self`: the temperature of the sampling.", default=1.0, gt=0, le=100)
    seed: Whole = key("For `self`: the seed of the sampling.", default=0, ge=0, le=2**32 - 1)

    @property
    def is_self(self) -> bool:
        """Whether this is text of the model itself."""
        return is_self(self.source)

    @property
    def holds_pairs(self) -> bool:
        """Whether the source holds pairs of texts, not running text or conversations."""
        return self.source_field is not None and self.format != "chat"

    def stated(self) -> dict[str, Any]:
        """The values that are not the defaults."""
        fields = fields_of(Source)
        return {name: value for name, value in asdict(self).items() if value != fields[name].default}


def _read_source(item: Any) -> Any:
    return item if isinstance(item, Source | Mapping) else {"source": item}


def _read_list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return [value]
    if not value:
        raise ValueError("it is an empty list: name at least one file, glob or Hub data set")
    return value


Sources = Annotated[
    tuple[Annotated[Source, BeforeValidator(_read_source)], ...],
    BeforeValidator(_read_list, json_schema_input_type=str | Source | list[str | Source]),
]
"""One source or a list of them, each a text or a mapping."""


def as_source(given: object) -> Source:
    """A source from a `Source`, a string or a mapping.

    Raises:
        DataError: it is none of these, or a key of it is unknown or not allowed.
    """
    if given == "":
        raise DataError("a data source is empty: name a file, a folder, a pattern or a dataset on the Hub")
    try:
        source: Source = read_keys(Source, _read_source(given), {}, "the data source")
    except ValueError as problem:
        raise DataError(str(problem)) from None
    return source


def open_source(source: Source, memory: Path, *, ask: bool = True, chats: bool = False) -> FileText | HubText:
    """Resolve a source to files or a Hub dataset, reading no more than the first row.

    Args:
        source: the source as the recipe states it.
        memory: the folder that remembers the commits of Hub datasets.
        ask: query the Hub for the commit of a dataset even if one is remembered.
        chats: whether the caller reads conversations, whose columns are a `ChatColumns`.

    Raises:
        DataError: the source holds conversations and `chats` is false; the file or dataset does not exist, a pattern matches nothing, or a key that only applies to Hub
            datasets is given for local files.
    """
    given = source.source
    columns = _columns(source, chats)
    if given in (STDLIB, HELD_OUT):
        _refuse_hub_keys(source)
        if isinstance(columns, ChatColumns):
            raise DataError(f"{given} is running text and format is chat: remove format")
        columns = TextColumn(source.text_field)
        return FileText(given, _found(source_files(given == HELD_OUT), given), columns, lenient=True)
    path = local_path(given)
    if source.is_self:
        raise DataError(
            f"{SELF} is the text that a model writes itself, which a recipe's data and convert --calibration generate; elsewhere, name a file"
        )
    if path.exists() or glob.has_magic(given):
        _refuse_hub_keys(source)
    if path.is_file():
        return _files(source, [path], columns)
    if path.is_dir():
        return _files(source, [file for file in sorted(path.rglob("*")) if _is_text(file)], columns)
    if glob.has_magic(given):
        files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207  # patterns may begin with /
        return _files(source, [file for file in files if file.is_file()], columns)
    if not is_on_hub(source):
        raise DataError(
            f"{given} does not exist: name a file, a folder, a pattern such as 'texts/*.jsonl', or a dataset on the Hub"
        )
    commit = commit_of(given, source.revision, memory, ask=ask)
    return HubText(given, commit, source.name, source.split, columns or TextColumn(source.text_field))


def _columns(source: Source, chats: bool) -> Columns | None:
    """The columns that a source states; None if its first row decides."""
    if source.format == "chat":
        if not chats:
            raise DataError(
                f"{source.source} holds conversations, which only decoders are trained and calibrated on: name running text"
            )
        return ChatColumns(source.messages_field, source.source_field, source.target_field)
    return None if chats and source.format == "auto" else TextColumn(source.text_field)


def _files(source: Source, files: list[Path], columns: Columns | None) -> FileText:
    """Files with the columns of their source, or those that the first row suggests."""
    text = FileText(source.source, _found(files, source.source), columns or source.text_field)
    if columns is None:
        names = text.first_fields()
        if source.messages_field in names and source.text_field not in names:
            text.columns = ChatColumns(source.messages_field)
    return text


def is_on_hub(source: Source) -> bool:
    """Whether a source is named like a Hub dataset and is no local file."""
    given = source.source
    if (
        given in (STDLIB, HELD_OUT)
        or source.is_self
        or given.startswith((".", "/", "~"))
        or not _HUB_ID.fullmatch(given)
    ):
        return False
    path = local_path(given)
    return kind_of(path) not in SUFFIXES and not path.exists()


def _refuse_hub_keys(source: Source) -> None:
    """Refuse keys that only apply to Hub datasets, which would be ignored for local files."""
    stated = source.stated()
    for name in ("split", "name", "revision"):
        if name in stated:
            raise DataError(
                f"{source.source} is a local source, and {name} = {stated[name]!r} only applies to datasets on the Hub: remove {name}"
            )


def _is_text(path: Path) -> bool:
    return path.is_file() and kind_of(path) in SUFFIXES


def _found(files: list[Path], given: str) -> list[Path]:
    if not files:
        raise DataError(f"{given} holds no text files: name a pattern that matches some, such as 'texts/*.jsonl'")
    return files
