"""What is known about a converted checkpoint: its files, their headers, and the record of its conversion."""

import re
from dataclasses import dataclass
from pathlib import Path

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.files import leads_out
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.source import CONFIG, Checkpoint, open_checkpoint
from gqa_convert.conversion.plan import Plan, make_plan
from gqa_convert.errors import GroupsError, PublishError
from gqa_convert.measuring.results.fields import parse_json
from gqa_convert.measuring.results.kv_heads import KVHeads, in_words, one_or_each
from gqa_convert.measuring.results.schemas import ConversionRecord, FileRecord, TrainingRecord

README = "README.md"
_LONGEST_CHAIN = 32
_LICENCE = re.compile(r"(licen[cs]e|notice|copying|use_policy)[^/]*", re.IGNORECASE)
_CACHED = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/?$")
"""A folder in the Hub's cache, with the repository and the commit that it holds."""


@dataclass(frozen=True)
class Base:
    """The checkpoint on the Hub that a model was made from.

    Attributes:
        repo_id: of the Hub.
        revision: its commit, None if only the name is known.
    """

    repo_id: str
    revision: str | None


@dataclass(frozen=True)
class Facts:
    """A checkpoint that has been read and checked.

    Attributes:
        folder: of the checkpoint.
        checkpoint: its config and headers.
        plan: of a conversion to the same N, which changes nothing; it has the heads and the cache sizes from the
            headers.
        chain: the record and those of the conversions before it, oldest first.
        trainings: the records of the uptraining runs since the first of these, oldest first.
    """

    folder: Path
    checkpoint: Checkpoint
    plan: Plan
    chain: tuple[ConversionRecord, ...]
    trainings: tuple[TrainingRecord, ...]

    @property
    def groups(self) -> KVHeads:
        """K/V heads per layer, or those of each layer."""
        return self.record.groups

    @property
    def record(self) -> ConversionRecord:
        """The record of the last conversion."""
        return self.chain[-1]

    @property
    def first_kv_heads(self) -> int | None:
        """K/V heads per layer before the first conversion."""
        return self.chain[0].source_kv_heads

    @property
    def base(self) -> Base | None:
        """The newest source that is known to come from the Hub: its commit was recorded, or its folder is in the Hub's
        cache.
        """
        for record in reversed(self.chain):
            source = record.source
            name, revision = (source.id, source.revision) if source else (None, None)
            if name and revision:
                return Base(name, revision)
            if name and (match := _CACHED.search(name)):
                return Base(f"{match[1]}/{match[2]}", match[3])
        return None

    @property
    def route(self) -> str:
        """The route by which it loads, as in `Plan.route`."""
        return self.record.route or self.plan.route

    @property
    def needs_own_code(self) -> bool:
        """Whether it loads only with `trust_remote_code=True`."""
        return bool(self.checkpoint.config.get("auto_map")) and self.route in ("own file", "checkpoint's own code")

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of all files to publish except the card: those that convert and uptrain wrote, and licences in the
        folder.
        """
        written = {CONFIG, PROVENANCE, "tokenizer_config.json", *_modules(self.checkpoint)}
        for record in self.chain:
            written |= _source_files(record).keys()
        return tuple(
            name
            for name in sorted(self.checkpoint.sizes)
            if name not in (*self.checkpoint.left_behind, README)
            and (name in written or formats.is_weight_file(name) or _LICENCE.fullmatch(name))
        )

    @property
    def strangers(self) -> tuple[str, ...]:
        """The files of the folder that are not published, except hidden ones."""
        return tuple(sorted(self.checkpoint.sizes.keys() - {*self.files, README}))

    @property
    def made(self) -> str:
        """When the weights were last changed, as ISO 8601; empty if that was not recorded."""
        return max([each.created or "" for each in self.chain] + [each.created or "" for each in self.trainings])

    def written_digest(self, name: str) -> str | None:
        """SHA-256 of a weight file as convert or uptrain wrote it, if it was recorded."""
        files = (self.record.result.files if self.record.result else None) or {}
        return files[name].sha256 if name in files else None

    def source_digest(self, name: str) -> set[str]:
        """SHA-256 of a file in the sources of all conversions, as far as they were recorded."""
        found = set[str]()
        for record in self.chain:
            entry = _source_files(record).get(name)
            if entry and entry.sha256:
                found.add(entry.sha256)
        return found


def read_facts(out: Path) -> Facts:
    """Open a converted checkpoint and check that its parts agree.

    Raises:
        PublishError: the folder is not a converted checkpoint, or its record contradicts its weights.
        GQAConvertError: as `open_checkpoint`.
    """
    if not out.is_dir():
        raise PublishError(
            f"{out} is {'a file' if out.exists() else 'not there'}: name the folder that convert or uptrain wrote"
        )
    checkpoint = open_checkpoint(out)
    path = out / PROVENANCE
    if not path.is_file():
        raise PublishError(
            f"{out} has no {PROVENANCE}, so that nothing is known of its making: name a folder that convert or uptrain wrote"
        )
    content = parse_json(path)
    if not isinstance(content, dict) or "groups" not in content:
        raise PublishError(f"{path} is not the record of a conversion: name a folder that convert or uptrain wrote")
    chain = _chain(content, path)
    groups = chain[-1].groups
    try:
        plan = make_plan(checkpoint, groups, native=_native(chain[-1]), encoder=content.get("encoder") is True)
    except GroupsError as problem:
        raise PublishError(
            f"{path} says N = {in_words(groups)}, which the weights contradict ({problem}): convert again"
        ) from None
    found = one_or_each(tuple(layer.kv_heads for layer in sorted(plan.layers, key=lambda layer: layer.number)))
    if found != groups:
        raise PublishError(
            f"{path} says N = {in_words(groups)}, and the weights have {in_words(found)} K/V heads per layer: convert "
            "again, or name another folder"
        )
    _check_code(checkpoint, out)
    _refuse_links(checkpoint, out)
    trainings = tuple(training for record in chain for training in record.uptraining)
    return Facts(out, checkpoint, plan, chain, trainings)


def _native(record: ConversionRecord) -> bool | None:
    """The argument of a plan that keeps the checkpoint's own type."""
    return False if record.route == "own file" else None


def _chain(content: object, path: Path) -> tuple[ConversionRecord, ...]:
    where = str(path)
    chain = [ConversionRecord.read(content, where)]
    while chain[0].previous is not None:
        if len(chain) == _LONGEST_CHAIN:
            raise PublishError(
                f"{path} records more than {_LONGEST_CHAIN} conversions in a row: convert the first source directly"
            )
        where = f"previous of {where}"
        chain.insert(0, ConversionRecord.read(chain[0].previous, where))
    return tuple(chain)


def _source_files(record: ConversionRecord) -> dict[str, FileRecord]:
    """The files of a conversion's source, by name, as far as they were recorded."""
    return (record.source.files if record.source else None) or {}


def _modules(checkpoint: Checkpoint) -> list[str]:
    """The modelling files that the config names."""
    auto_map = checkpoint.config.get("auto_map")
    homes = auto_map.values() if isinstance(auto_map, dict) else ()
    names = [name for home in homes for name in (home if isinstance(home, list) else [home])]
    return [f"{name.split('.')[0]}.py" for name in names if isinstance(name, str) and "--" not in name]


def _check_code(checkpoint: Checkpoint, out: Path) -> None:
    for name in _modules(checkpoint):
        if name not in checkpoint.sizes:
            raise PublishError(f"{out} lacks {name}, which its config.json needs to load: convert again")


def _refuse_links(checkpoint: Checkpoint, out: Path) -> None:
    """Refuse weights, a config or a record that lie elsewhere; other links that lead out of the folder are left out."""
    for name in (PROVENANCE, *checkpoint.sizes):
        if name not in checkpoint.left_behind and leads_out(out / name, out):
            raise PublishError(f"{out / name} is a link that leads out of the folder: put the file in its place")
