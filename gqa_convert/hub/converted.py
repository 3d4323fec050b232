"""A converted checkpoint, opened and checked for publication, and what of its record a card may
show.

Cards call local files and folders by their last names, so that no folder of the machine is on them.
Records state a path as a whole value: an argument, a key of a recipe, the source. What follows its
last slash is its name, whatever else is in it, spaces too. A name on the Hub keeps its owner, since
the record states its commit beside it.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint.files import leads_out
from gqa_convert.checkpoint.provenance import PROVENANCE, earlier_record
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.errors import GroupsError, PublishError
from gqa_convert.families.loading import auto_class, headless_class
from gqa_convert.merging.methods import COPY
from gqa_convert.publishing.ownership import CARD
from gqa_convert.runtime.json_objects import JsonObject

from .repository import is_hub_id

_ON_HUB = ("id", "source", "model")
"""Keys whose value is on the Hub where a `revision` stands beside it."""
_DATASET = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{12}\b")
"""A Hub dataset and its commit, in words."""
_FOLDERS = re.compile(r"(-{0,2}[\w.-]+=|-\w|@|[\d,]+ tokens of |)(.*/)(.*)", re.DOTALL)
"""What may stand before a path (an option, a key of a recipe, the sign of a file, a number of
tokens), its folders, and its name.
"""
_SEVERAL = re.compile(r" and |\[|\{")
"""What joins sources, of which only the last one can be told from folders."""
_LICENSE_FILE = re.compile(r"(licen[cs]e|notice|copying|use_policy)[^/]*", re.IGNORECASE)


def names_on_hub(record: JsonObject) -> set[str]:
    """The ids on the Hub that a record states with their commits."""
    found: set[Any] = set()

    def note(part: JsonObject) -> None:
        if part.get("revision"):
            found.update(part.get(key) for key in _ON_HUB)

    json.loads(json.dumps(record), object_hook=note)
    return found


def without_folders(value: Any, on_hub: Collection[str] = ()) -> Any:
    """Plain data in which local files and folders are called by their last names.

    Args:
        value: a record, or a part of one.
        on_hub: what is the name of no file.
    """
    if isinstance(value, dict):  # names of processors hold slashes
        return {
            key: each if key == "processor" else without_folders(each, on_hub)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [without_folders(each, on_hub) for each in value]
    if not isinstance(value, str) or value in on_hub or re.match("https?://", value):
        return value
    path = _FOLDERS.fullmatch(value.rstrip("/"))
    if path is None or "/" not in _DATASET.sub("", value):
        return value
    before, folders, name = path.groups()
    omission = "... " if _SEVERAL.search(folders) else ""
    return before + omission + name


@dataclass(frozen=True)
class Converted:
    """A converted checkpoint.

    Attributes:
        plan: of a conversion to the same N, which changes nothing: it has heads, sizes and engines
            from the headers.
        records: of the conversions that made it, oldest first, without folders of the machine.
        names_folders: whether the record as it is published names folders of the machine.
        files: paths of what is published besides the card: what convert and uptrain wrote, and
            licences.
        untracked: paths of other files in the folder, which stay.
    """

    folder: Path
    checkpoint: Checkpoint
    plan: Plan
    records: list[JsonObject]
    names_folders: bool
    files: list[str]
    untracked: list[str]

    @property
    def record(self) -> JsonObject:
        """The record of the last conversion."""
        return self.records[-1]

    @property
    def first(self) -> JsonObject:
        """The record of the first conversion, whose source the card compares with."""
        return self.records[0]

    @property
    def trainings(self) -> list[JsonObject]:
        """The uptraining runs, oldest first."""
        return [training for record in self.records for training in record.get("uptraining", [])]

    @property
    def base_model(self) -> tuple[str | None, str | None]:
        """Hub id and commit of the newest source whose commit is recorded."""
        for record in reversed(self.records):
            source = record["source"]
            if source["revision"] and is_hub_id(source["id"]):
                return source["id"], source["revision"]
        return None, None

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads it."""
        return headless_class(self.checkpoint.config) or auto_class(self.checkpoint.config)


def open_converted(folder: Path) -> Converted:
    """Open a converted checkpoint and check that its parts agree.

    Raises:
        PublishError: the folder is no converted checkpoint, its record contradicts its weights, or
            a file that it needs is missing or lies elsewhere.
        GQAConvertError: as `open_checkpoint`.
    """
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: name the one that convert or uptrain wrote")
    checkpoint = open_checkpoint(folder)
    # weights and config may be links, but what is sent must lie here
    for name in {PROVENANCE, *checkpoint.sizes} - set(checkpoint.left_behind):
        if leads_out(folder / name, folder):
            raise PublishError(
                f"{folder / name} is a link that leads out of the folder: put the file in its place"
            )
    # the record must name all that the model needs
    stated = earlier_record(checkpoint)
    if stated is None:
        raise PublishError(
            f"{folder} has no {PROVENANCE}: name a folder that convert or uptrain wrote"
        )
    for key in ("source", "route", "method", "kv_heads", "previous", "written"):
        if key not in stated:
            raise PublishError(
                f"{folder / PROVENANCE} is not the record of a conversion (it has no {key}): "
                "convert again"
            )
    newest = without_folders(stated, names_on_hub(stated))
    for name in newest["written"]:
        if name.endswith(".py") and name not in checkpoint.sizes:
            raise PublishError(
                f"{folder} lacks {name}, which its config.json needs to load: convert again"
            )
    for shard in checkpoint.shards:
        if shard.file not in newest["written"]:
            raise PublishError(
                f"{folder / shard.file} was written by neither convert nor uptrain: convert again"
            )
    # a result may have been converted again
    records = [newest]
    while records[0]["previous"] is not None:
        records.insert(0, records[0]["previous"])
    # nothing is sent that neither convert nor uptrain wrote, except licences
    files: list[str] = []
    untracked: list[str] = []
    for name in sorted(checkpoint.sizes.keys() - {CARD}):
        is_ours = name in newest["written"] or name == PROVENANCE or _LICENSE_FILE.fullmatch(name)
        (files if is_ours else untracked).append(name)
    plan = _plan_without_change(checkpoint, newest)
    names_folders = newest != stated
    return Converted(folder, checkpoint, plan, records, names_folders, files, untracked)


def _plan_without_change(checkpoint: Checkpoint, record: JsonObject) -> Plan:
    """The plan of a conversion to the recorded N; weights that it would change have another one."""
    kv_heads = record["kv_heads"]
    native = False if record["route"] == "own file" else None
    try:
        plan = make_plan(checkpoint, kv_heads, native=native)
        if plan.merge_method is COPY:
            return plan
    except GroupsError:
        pass
    raise PublishError(
        f"{PROVENANCE} says N = {kv_heads}, which the weights contradict: convert again"
    )
