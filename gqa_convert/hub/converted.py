"""A converted checkpoint, opened and checked for publication."""

import re
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint.files import leads_out
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.signed_card import CARD
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.errors import GroupsError, PublishError
from gqa_convert.families.loading import auto_class, headless_class
from gqa_convert.hub.names import PublicNames
from gqa_convert.hub.options import HUB_ID
from gqa_convert.hub.record import ConversionRecord, read_records
from gqa_convert.merging.methods import COPY

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
        return "auto_map" in self.checkpoint.config and self.record.route in ("own file", "checkpoint's own code")

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
            raise PublishError(f"{folder / name} is a link that leads out of the folder: put the file in its place")
    records, names = read_records(folder)
    record = records[-1]
    for name in record.written:
        if name.endswith(".py") and name not in checkpoint.sizes:
            raise PublishError(f"{folder} lacks {name}, which its config.json needs to load: convert again")
    for shard in checkpoint.shards:
        if shard.file not in record.written:
            raise PublishError(f"{folder / shard.file} was written by neither convert nor uptrain: convert again")
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
    raise PublishError(f"{PROVENANCE} says N = {record.groups}, which the weights contradict: convert again")
