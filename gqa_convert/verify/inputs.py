"""Reads what the user named: OUT and SOURCE. A mistake in one of them is an error, not a failed check."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.fingerprint import SCHEME, fingerprint
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.conversion.rewriting.folder import rewritten_folder
from gqa_convert.conversion.rewriting.planning import needs_rewriting, plan_rewriting
from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError, first_line
from gqa_convert.families.composite import decoder_config
from gqa_convert.families.family import Family, Modeling
from gqa_convert.families.loading import read_config, read_object
from gqa_convert.families.records import with_key_norm
from gqa_convert.families.table import family_of
from gqa_convert.runtime.paths import local_path
from gqa_convert.verify.weights import PREFERENCE, PROVENANCE, JsonObject, Weights

Progress = Callable[[str, int, int], None]
"""Called with a stage (tensors or logits), the amount done and the total: bytes or steps."""
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Inputs:
    """The two checkpoints of a verification."""

    out: Path
    out_config: JsonObject
    claims: JsonObject
    """OUT's provenance record. Both are empty if they cannot be read."""
    source: Weights
    """SOURCE's tensors, in the form in which it was converted."""
    config: JsonObject
    """SOURCE's config in that form."""
    result_dtypes: dict[str, torch.dtype]
    """The types that OUT must have for tensors that a rewritten SOURCE holds in a wider one."""
    family: Family
    original: Weights
    """The tensors of SOURCE as the user named it: `source`, unless it is rewritten before it is converted."""
    named: Checkpoint
    """The same, opened by the converter: its config, and what the user or the record calls it."""

    def result_dtype(self, name: str) -> torch.dtype:
        """The type of a tensor of SOURCE in OUT."""
        return self.result_dtypes.get(name, self.source.tensors[name].dtype)

    @property
    def decoder_config(self) -> JsonObject:
        """The config of SOURCE's decoder, which in a composite model is nested in `config`."""
        return decoder_config(self.config)

    @property
    def modeling(self) -> Modeling | None:
        """The modelling file that OUT, if it has fewer heads, must come with: that of the form of layers that differ
        which its config has, or the family's.
        """
        stated = self.out_config.get("model_type")
        return next(
            (form for form in self.family.layerwise if form.model_type == stated),
            self.family.modeling,
        )

    @property
    def has_class(self) -> bool:
        """Whether transformers has a class for the type. Some types exist only as code in checkpoints."""
        return self.family.native or self.family.modeling is not None


@contextmanager
def read_inputs(
    out: str | Path, source: str | Path | None, revision: str | None, on_note: Callable[[str], None]
) -> Iterator[Inputs]:
    """Open both checkpoints. Remote checkpoints are downloaded. A SOURCE that a conversion to OUT rewrites first is
    rewritten in a folder beside OUT, which goes at the end of the context.

    Args:
        out: the converted folder.
        source: the folder or the Hub id that it was made from; None for what its record names.
        revision: branch, tag or commit on the Hub.
        on_note: called with sentences on what is rewritten.

    Raises:
        SourceNotFoundError: `out` is no folder with a checkpoint, or `source` holds none or another one, or is not given and
            not found.
        ConfigError: SOURCE's config is damaged.
        CorruptCheckpointError: SOURCE's weights cannot be opened.
        UnsupportedFamilyError: SOURCE's model type cannot be converted.
        OptionError: SOURCE cannot be rewritten as OUT's type.
    """
    out = local_path(out)
    if not out.is_dir():
        raise SourceNotFoundError(f"{out} is not a folder: name the converted checkpoint")
    claims, out_config = read_object(out / PROVENANCE), read_config(out)
    if not (out / PROVENANCE).exists() and not (
        out_config and any((out / name).exists() for name in PREFERENCE)
    ):
        raise SourceNotFoundError(f"{out} holds no checkpoint: name the folder that convert wrote")
    checkpoint = converted = _open_origin(out, claims.get("source"), source, revision)
    with ExitStack() as stack:
        if needs_rewriting(checkpoint.config, out_config.get("model_type")):
            planned = plan_rewriting(checkpoint, native=True)
            for note in planned.rewriting_notes:
                on_note(note)
            converted = stack.enter_context(rewritten_folder(planned, out))
        family = family_of(converted.config)
        weights = original = _open_source(converted)
        if converted is not checkpoint:
            original = _open_source(checkpoint)
        if not family.listed:
            family = with_key_norm(family, weights.tensors, converted.config["num_key_value_heads"])
        dtypes = {name: _TORCH[dtype] for name, dtype in converted.result_dtypes.items()}
        yield Inputs(
            out, out_config, claims, weights, converted.config, dtypes, family, original, checkpoint
        )


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
    checkpoint = open_checkpoint(source, revision=revision, download=True)
    known = str(stated.get("fingerprint"))
    if known.startswith(SCHEME) and known != fingerprint(checkpoint):
        raise SourceNotFoundError(
            f"{out} was made from {stated.get('id')}, not from {source}, which has another config or other weights: name "
            "the former with --source"
        )
    return checkpoint


def _open_source(checkpoint: Checkpoint) -> Weights:
    try:
        return Weights(checkpoint.local_folder)
    except Exception as problem:
        raise CorruptCheckpointError(
            f"{checkpoint.folder} cannot be read ({first_line(problem)}): download or copy the source again"
        ) from None
