"""A converted checkpoint, opened and checked for publication; and its `gqa_conversion.json`, as far as a card states it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gqa_convert.checkpoint.files import leads_out
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.errors import GroupsError, PublishError
from gqa_convert.families.loading import auto_class, headless_class
from gqa_convert.hub.names import PublicNames
from gqa_convert.hub.options import HUB_ID
from gqa_convert.merging.methods import COPY
from gqa_convert.publishing.ownership import CARD
from gqa_convert.runtime.json_objects import JsonObject, parse_object


class ConversionRecord(BaseModel):
    """A conversion and the uptraining runs after it. What a card states and nothing else depends on is plain data."""

    model_config = ConfigDict(
        frozen=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )

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


_LICENSE_FILE = re.compile(r"(licen[cs]e|notice|copying|use_policy)[^/]*", re.IGNORECASE)


@dataclass(frozen=True)
class Converted:
    """A converted checkpoint.

    Attributes:
        plan: of a conversion to the same N, which changes nothing: it has heads, sizes and engines from the headers.
        records: of the conversions that made it, oldest first, without folders of the machine.
        names: of what the records state.
        files: paths of what is published besides the card: what convert and uptrain wrote, and licences.
        untracked: paths of other files in the folder, which stay.
    """

    folder: Path
    checkpoint: Checkpoint
    plan: Plan
    records: list[ConversionRecord]
    names: PublicNames
    files: list[str]
    untracked: list[str]

    @property
    def record(self) -> ConversionRecord:
        """The record of the last conversion."""
        return self.records[-1]

    @property
    def first(self) -> ConversionRecord:
        """The record of the first conversion, whose source the card compares with."""
        return self.records[0]

    @property
    def trainings(self) -> list[JsonObject]:
        """The uptraining runs, oldest first."""
        return [training for record in self.records for training in record.uptraining]

    @property
    def base_model(self) -> tuple[str | None, str | None]:
        """Hub id and commit of the newest source whose commit is recorded."""
        for record in reversed(self.records):
            name, revision = record.source["id"], record.source["revision"]
            if revision and HUB_ID.fullmatch(name):
                return name, revision
        return None, None

    @property
    def needs_remote_code(self) -> bool:
        """Whether it loads only with `trust_remote_code=True`."""
        return "auto_map" in self.checkpoint.config and self.record.route in (
            "own file",
            "checkpoint's own code",
        )

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads it."""
        return headless_class(self.checkpoint.config) or auto_class(self.checkpoint.config)


def open_converted(folder: Path) -> Converted:
    """Open a converted checkpoint and check that its parts agree.

    Raises:
        PublishError: the folder is no converted checkpoint, its record contradicts its weights, or a file that it needs
            is missing or lies elsewhere.
        GQAConvertError: as `open_checkpoint`.
    """
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: name the one that convert or uptrain wrote")
    checkpoint = open_checkpoint(folder)
    for name in {PROVENANCE, *checkpoint.sizes} - set(checkpoint.left_behind):
        if leads_out(folder / name, folder):
            raise PublishError(
                f"{folder / name} is a link that leads out of the folder: put the file in its place"
            )
    records, names = read_records(folder)
    record = records[-1]
    for name in record.written:
        if name.endswith(".py") and name not in checkpoint.sizes:
            raise PublishError(
                f"{folder} lacks {name}, which its config.json needs to load: convert again"
            )
    for shard in checkpoint.shards:
        if shard.file not in record.written:
            raise PublishError(
                f"{folder / shard.file} was written by neither convert nor uptrain: convert again"
            )
    wanted = {*record.written, PROVENANCE}
    found = sorted(checkpoint.sizes.keys() - {CARD})
    files = [name for name in found if name in wanted or _LICENSE_FILE.fullmatch(name)]
    return Converted(
        folder=folder,
        checkpoint=checkpoint,
        plan=_plan_without_change(checkpoint, record),
        records=records,
        names=names,
        files=files,
        untracked=[name for name in found if name not in files],
    )


def _plan_without_change(checkpoint: Checkpoint, record: ConversionRecord) -> Plan:
    """The plan of a conversion to the recorded N; weights that it would change have another one."""
    native = False if record.route == "own file" else None
    try:
        plan = make_plan(checkpoint, record.groups, native=native, encoder=record.encoder)
        if plan.merge_method is COPY:
            return plan
    except GroupsError:
        pass
    raise PublishError(
        f"{PROVENANCE} says N = {record.groups}, which the weights contradict: convert again"
    )
