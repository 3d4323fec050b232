"""The results of `evaluate` and `benchmark`: their keys, reading, writing, and to which checkpoint
they belong.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gqa_convert.errors import NoSpaceError, OutputError, ReportError, is_disk_full
from gqa_convert.publishing.atomic_files import write_json
from gqa_convert.runtime.json_objects import Result
from gqa_convert.runtime.machine import Machine

Number = float | None
"""None, null in the file, stands for what was not measured or is not finite."""


class _Stored(Result, BaseModel):
    """Its JSON form has every key; null stands for what was not measured."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, protected_namespaces=())


class _Measurement(_Stored):
    """What every file begins with; see `runtime.machine.measurement`, which makes these fields."""

    format_version: Literal[1] = 1
    created: str
    command: list[str] | None = None
    machine: Machine


class Found(_Stored):
    """The share of questions on long texts that a model answers exactly, of one kind or at one
    length; null for all.

    `difference` is the share minus that of the model that the others are compared with, paired text
    by text.
    """

    kind: str | None
    length: int | None
    questions: int
    found: float
    found_standard_error: float
    difference: Number = None
    difference_standard_error: Number = None


class _Losses(_Stored):
    """Nats per token and bits per byte, null where not measured or not finite."""

    loss: Number = None
    loss_standard_error: Number = None
    bits_per_byte: Number = None
    bits_per_byte_standard_error: Number = None
    word_error_rate: Number = None
    word_error_rate_standard_error: Number = None


class Difference(_Losses):
    """How much more a model loses than another on the same text."""

    to: str


class _Model(_Stored):
    model: str
    revision: str | None = None
    fingerprint: str | None = None
    kv_bytes_per_token: Number = None
    dtype: str | None = None


class ModelScores(_Losses, _Model):  # in this order, a file states the model before its losses
    """One model of an evaluation; losses and divergences in nats per token, null where not measured
    or not finite.
    """

    tokens: int = 0
    bytes: int | None = None
    scored_nan: int = 0
    difference: Difference | None = None
    kl: Number = None
    kl_standard_error: Number = None
    retrieval: list[Found] | None = None
    note: str | None = None


class ScoredText(_Stored):
    """The text of an evaluation: its source and the options that it was read with."""

    source: str
    split: str | None = None
    name: str | None = None
    revision: str | None = None
    text_field: str | None = None
    source_field: str | None = None
    target_field: str | None = None
    tokens_limit: int | None = None


class AskedQuestions(_Stored):
    """What models are asked: so many questions of each kind at each length, in tokens."""

    lengths: list[int]
    questions: int


class EvaluationFile(_Measurement):
    """What `evaluate` writes; `data` is null where no text was scored, `questions` where none were
    asked.
    """

    kind: Literal["evaluate"] = "evaluate"
    data: ScoredText | None = None
    questions: AskedQuestions | None = None
    objective: str
    context: int | None = None
    reference: ModelScores | None = None
    results: list[ModelScores] = Field(min_length=1)

    def entries(self) -> list[ModelScores]:
        """Those of all models, each once, the reference first."""
        if self.reference is None:
            return self.results
        return [
            self.reference,
            *(each for each in self.results if each.model != self.reference.model),
        ]


class TimedCell(_Stored):
    """One number of K/V heads at one batch and context: the median time of a decode step and its
    quartiles, and the bytes of the whole cache.
    """

    kv_heads: int
    batch: int
    context: int
    decode_ms_per_token: float
    decode_ms_low: float
    decode_ms_high: float
    kv_bytes: int


class BenchmarkFile(_Measurement):
    """What `benchmark` measures."""

    kind: Literal["benchmark"] = "benchmark"
    model: str
    model_type: str
    dtype: str
    heads: int
    source_kv_heads: int
    attention: str
    results: list[TimedCell]


def load_evaluation(path: Path) -> EvaluationFile:
    """Read a file that `evaluate` wrote.

    Raises:
        ReportError: it does not exist, can't be read, is no such file, has another format version,
            or a key has a value of the wrong type.
    """
    if not path.exists():
        raise ReportError(f"{path} does not exist: name a file that evaluate wrote")
    try:
        return EvaluationFile.model_validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError):
        raise ReportError(
            f"{path} can't be read as results of evaluate: name a file that evaluate wrote"
        ) from None


def write_result(path: Path, value: EvaluationFile) -> None:
    """Write results as JSON: the file appears whole or not at all.

    Raises:
        OutputError: as of `check_result_path`, or the file can't be written.
        NoSpaceError: the disk is full.
    """
    check_result_path(path)
    try:
        write_json(path, value.as_json())
    except OSError as problem:
        if is_disk_full(problem):
            raise NoSpaceError(
                f"the disk or quota of {path} is full: free some space, or name another file"
            ) from None
        raise OutputError(
            f"{path} can't be written ({problem.strerror or problem}): name another file"
        ) from None


def check_result_path(path: Path) -> None:
    """Refuse a file that can't be written, before the measurement begins.

    Raises:
        OutputError: the file exists, or its folder is missing.
    """
    if not path.absolute().parent.is_dir():
        raise OutputError(f"the folder of {path} does not exist: make it, or name another file")
    if path.exists():
        raise OutputError(f"{path} exists already: name a new file")
