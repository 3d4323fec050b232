"""`gqa_conversion.json`, as far as a model card states it. The names of the fields are the keys in the file."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.strict_json import JsonObject, parse_object
from gqa_convert.errors import PublishError
from gqa_convert.hub.names import PublicNames


class ConversionRecord(BaseModel):
    """A conversion and the uptraining runs after it. What a card states and nothing else depends on is plain data."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    source: JsonObject
    """What was converted: `id`, a folder or Hub id, its commit `revision`, `fingerprint` and `model_type`."""
    route: str
    method: str
    groups: int | list[int]
    encoder: bool
    calibration: JsonObject | None
    kv_bytes_per_token: JsonObject | None = None
    cross_kv_bytes_per_encoder_token: JsonObject | None = None
    uptraining: list[JsonObject] = []
    previous: "ConversionRecord | None"
    written: dict[str, JsonObject]
    """The `bytes` and the `sha256` of files; there is no hash of weights that were streamed without `--hash`."""


def read_records(folder: Path) -> tuple[list[ConversionRecord], PublicNames]:
    """The records of the conversions that made a checkpoint, oldest first, without folders of the machine; and the names
    of what they state.

    Raises:
        PublishError: there is no record, or it is no record of a conversion.
    """
    path = folder / PROVENANCE
    try:
        content = parse_object(path.read_bytes(), str(path))
        names = PublicNames(content)
        newest = ConversionRecord.model_validate_json(json.dumps(names.of(content)), strict=True)
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
    return records, names
