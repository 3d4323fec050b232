"""Reads what the user named: OUT, OUT's record, and SOURCE. A mistake in one of them is an error,
not a failed check.

Tensors are read with the safetensors library and torch, not with the reader that the converter
uses.
"""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gqa_convert.checkpoint.fingerprint import SCHEME, fingerprint
from gqa_convert.checkpoint.source import Checkpoint, open_local
from gqa_convert.conversion.rewriting.source import (
    needs_rewriting,
    plan_rewriting,
    rewritten_folder,
)
from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError, first_line
from gqa_convert.families.composite import decoder_config
from gqa_convert.families.family import Family, Modeling
from gqa_convert.families.loading import read_config, read_object
from gqa_convert.families.records import with_key_norm
from gqa_convert.families.table import family_of
from gqa_convert.runtime.paths import local_path

JsonObject = dict[str, Any]
Tensors = dict[str, Tensor]
Progress = Callable[[str, int, int], None]
"""Called with a stage, such as `tensors`, the steps done and their number."""

CONFIG = "config.json"
PROVENANCE = "gqa_conversion.json"


class Weights:
    """The tensors of a checkpoint folder, mapped into memory: reading one reads the file.

    Args:
        folder: the checkpoint's folder.
        files: those in it that hold the weights.
        error: what to raise where a file cannot be read, or a tensor occurs twice.

    Attributes:
        tensors: every tensor in them, whatever an index says.
        file_of: the file of each.
        metadata: of all safetensors files together.
    """

    def __init__(self, folder: Path, files: list[str], error: type[Exception]) -> None:
        self.folder = folder
        self.files = files
        self.tensors: Tensors = {}
        self.file_of: dict[str, str] = {}
        self.metadata: dict[str, str] = {}
        for file in files:
            try:
                found = self._map_file(folder / file)
            except Exception as problem:
                reason = first_line(problem)
                raise error(
                    f"{folder / file} cannot be read ({reason}): download or copy it again"
                ) from None
            if twice := found.keys() & self.tensors.keys():
                raise error(f"{folder} holds tensor {min(twice)} twice, once in {file}")
            self.tensors |= found
            self.file_of |= dict.fromkeys(found, file)

    def __str__(self) -> str:
        size = sum((self.folder / file).stat().st_size for file in self.files)
        return f"{len(self.files)} weight file(s), {size:,} bytes"

    def _map_file(self, path: Path) -> Tensors:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as opened:
                self.metadata |= opened.metadata() or {}
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        is_mapped = zipfile.is_zipfile(path)  # files from before torch 1.6 are none
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


@dataclass(frozen=True)
class Inputs:
    """The two checkpoints of a verification.

    Attributes:
        out: the folder of OUT.
        out_config: its config.
        claims: its provenance record. Both are empty if they cannot be read.
        named: SOURCE as the user or the record names it, opened by the converter.
        original: its tensors.
        converted: SOURCE in the form in which it was converted: `named`, unless that is rewritten.
        source: the tensors of that form.
        family: the record of that form.
    """

    out: Path
    out_config: JsonObject
    claims: JsonObject
    named: Checkpoint
    original: Weights
    converted: Checkpoint
    source: Weights
    family: Family

    @property
    def decoder_config(self) -> JsonObject:
        """The config of SOURCE's decoder, which in a composite model is nested."""
        return decoder_config(self.converted.config)

    @property
    def modeling(self) -> Modeling | None:
        """The modelling file that OUT, if it has fewer heads, must come with: that of the form of
        layers that differ which its config has, or the family's.
        """
        for form in self.family.layerwise:
            if form.model_type == self.out_config.get("model_type"):
                return form
        return self.family.modeling

    @property
    def has_class(self) -> bool:
        """Whether transformers has a class for the type. Some exist only as code in checkpoints."""
        return self.family.native or self.family.modeling is not None


@contextmanager
def read_inputs(
    out: str | Path, source: str | Path | None, revision: str | None, on_note: Callable[[str], None]
) -> Iterator[Inputs]:
    """Open both checkpoints. Remote checkpoints are downloaded. A SOURCE that a conversion to OUT
    rewrites first is rewritten in a folder beside OUT, which goes at the end of the context.

    Args:
        out: the converted folder.
        source: the folder or the Hub id that it was made from; None for what its record names.
        revision: branch, tag or commit on the Hub.
        on_note: called with sentences on what is rewritten.

    Raises:
        SourceNotFoundError: `out` is no folder with a checkpoint, or `source` holds none or another
            one, or is not given and not found.
        ConfigError: SOURCE's config is damaged.
        CorruptCheckpointError: SOURCE's weights cannot be opened.
        UnsupportedFamilyError: SOURCE's model type cannot be converted.
        OptionError: SOURCE cannot be rewritten as OUT's type.
    """
    out = local_path(out)
    if not out.is_dir():
        raise SourceNotFoundError(f"{out} is not a folder: name the converted checkpoint")
    out_config = read_config(out)
    has_weights = any(out.glob("*.safetensors"))
    if not (out / PROVENANCE).exists() and not (out_config and has_weights):
        raise SourceNotFoundError(f"{out} holds no checkpoint: name the folder that convert wrote")
    claims = read_object(out / PROVENANCE)
    checkpoint = _open_origin(out, claims.get("source"), source, revision)
    original = weights = _open_source(checkpoint)
    rewriting: AbstractContextManager[Checkpoint] = nullcontext(checkpoint)
    if needs_rewriting(checkpoint.config, out_config.get("model_type")):
        planned = plan_rewriting(checkpoint, native=True)
        for note in planned.rewriting_notes:
            on_note(note)
        rewriting = rewritten_folder(planned, out)
    with rewriting as converted:
        if converted is not checkpoint:
            weights = _open_source(converted)
        family = family_of(converted.config)
        if not family.listed:
            family = with_key_norm(family, weights.tensors, converted.config["num_key_value_heads"])
        yield Inputs(
            out=out,
            out_config=out_config,
            claims=claims,
            named=checkpoint,
            original=original,
            converted=converted,
            source=weights,
            family=family,
        )


def _open_source(checkpoint: Checkpoint) -> Weights:
    files = [shard.file for shard in checkpoint.shards]
    return Weights(checkpoint.local_folder, files, CorruptCheckpointError)


def _open_origin(
    out: Path, recorded: Any, source: str | Path | None, revision: str | None
) -> Checkpoint:
    """Open SOURCE, which must be what OUT was made from.

    Args:
        out: for messages.
        recorded: what OUT's record says of its source, if that can be read.
        source: what the user named.
        revision: branch, tag or commit on the Hub.

    Raises:
        SourceNotFoundError: it is another checkpoint, or is not named and not found.
    """
    stated = recorded if isinstance(recorded, dict) else {}
    if source is None:
        source, revision = stated.get("id"), revision or stated.get("revision")
        if not source or (not revision and not local_path(source).is_dir()):
            named = f"names {source}, which is not here" if source else "names no source"
            raise SourceNotFoundError(
                f"the record in {out} {named}: name what it was made from with --source"
            )
    checkpoint = open_local(source, revision)
    known = str(stated.get("fingerprint"))
    if known.startswith(SCHEME) and known != fingerprint(checkpoint):
        raise SourceNotFoundError(
            f"{out} was made from {stated.get('id')}, not from {source}, which has another config "
            "or other weights: name the former with --source"
        )
    return checkpoint
