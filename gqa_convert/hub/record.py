"""`gqa_conversion.json`, as far as a model card states it. The names of the fields are the keys in the file."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gqa_convert.checkpoint.machine import Machine
from gqa_convert.checkpoint.provenance import PROVENANCE, BeforeAfter, Divergence
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.errors import PublishError


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, protected_namespaces=())


class WrittenFile(_Part):
    """A file that convert or uptrain wrote; the hash is unknown of weights that were streamed without `--hash`."""

    bytes: int
    sha256: str | None = None


class Source(_Part):
    """What was converted: a folder, or a Hub id and its commit."""

    id: str
    revision: str | None
    fingerprint: str
    model_type: str


class Calibration(_Part):
    """The calibration text in words, the divergence from the source on text that decided nothing, in nats per token, and what
    was left out, and why.
    """

    text: str
    kl: Divergence | None
    left_out: list[str] = []


class Training(_Part):
    """An uptraining run: its recipe with all keys and the commits of Hub datasets, and losses on the recipe's evaluation
    text in nats per token (`start`, `final`, `source`) with the share of the gap to the source that closed.
    """

    command: list[str] | None
    machine: Machine
    tokens: int
    recipe: JsonObject
    evaluation: dict[str, float | None] | None
    adapters: str | None = None


class ConversionRecord(_Part):
    """A conversion and the uptraining runs after it."""

    command: list[str] | None
    machine: Machine
    source: Source
    model_type: str
    route: str
    method: str
    calibration: Calibration | None
    heads: int
    source_kv_heads: int
    groups: int | list[int]
    encoder: bool
    parameters: BeforeAfter
    kv_bytes_per_token: BeforeAfter | None = None
    cross_kv_bytes_per_encoder_token: BeforeAfter | None = None
    merge_error: dict[str, float]
    uptraining: list[Training] = []
    previous: "ConversionRecord | None"
    written: dict[str, WrittenFile]


def read_records(folder: Path) -> tuple[ConversionRecord, ...]:
    """The records of the conversions that made a checkpoint, oldest first.

    Raises:
        PublishError: there is no record, or it is no record of a conversion.
    """
    path = folder / PROVENANCE
    try:
        newest = ConversionRecord.model_validate_json(path.read_bytes(), strict=True)
    except OSError:
        raise PublishError(
            f"{folder} has no {PROVENANCE} that can be read: name a folder that convert or uptrain wrote"
        ) from None
    except ValidationError as problem:
        first = problem.errors()[0]
        raise PublishError(
            f"{path} is not the record of a conversion ({first['loc']}: {first['msg']}): convert again"
        ) from None
    records = [newest]
    while (earlier := records[0].previous) is not None:
        records.insert(0, earlier)
    return tuple(records)
