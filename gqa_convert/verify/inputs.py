"""Reads what the user named: OUT and SOURCE. A mistake in one of them is an error, not a failed check."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gqa_convert.checkpoint.paths import local_path
from gqa_convert.checkpoint.source import Checkpoint, open_checkpoint
from gqa_convert.conversion.rewriting.folder import rewritten_folder
from gqa_convert.conversion.rewriting.planning import needs_rewriting, plan_rewriting
from gqa_convert.errors import CorruptCheckpointError, SourceNotFoundError, first_line
from gqa_convert.families.composite import decoder_config
from gqa_convert.families.family import Family, Modeling
from gqa_convert.families.loading import read_config
from gqa_convert.families.records import with_key_norm
from gqa_convert.families.table import family_of
from gqa_convert.verify.weights import Weights

Progress = Callable[[str, int, int], None]
"""Called with a stage (tensors or logits), the amount done and the total: bytes or steps."""
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Inputs:
    """The two checkpoints of a verification."""

    out: Path
    out_config: dict[str, Any]
    """Empty if it cannot be read."""
    source: Weights
    """SOURCE's tensors, in the form in which it was converted."""
    config: dict[str, Any]
    """SOURCE's config in that form."""
    family: Family
    original: Weights
    """The tensors of SOURCE as the user named it: `source`, unless it is rewritten before it is converted."""
    original_config: dict[str, Any]

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The config of SOURCE's decoder, which in a composite model is nested in `config`."""
        return decoder_config(self.config)

    @property
    def modeling(self) -> Modeling | None:
        """The modelling file that OUT, if it has fewer heads, must come with: that of the form of layers that differ
        which its config has, or the family's.
        """
        stated = self.out_config.get("model_type")
        return next((form for form in self.family.layerwise if form.model_type == stated), self.family.modeling)

    @property
    def has_class(self) -> bool:
        """Whether transformers has a class for the type. Some types exist only as code in checkpoints."""
        return self.family.native or self.family.modeling is not None


@contextmanager
def read_inputs(
    out: str | Path, source: str | Path, revision: str | None, on_note: Callable[[str], None]
) -> Iterator[Inputs]:
    """Open both checkpoints. Remote checkpoints are downloaded. A SOURCE that a conversion to OUT rewrites first is
    rewritten in a folder beside OUT, which goes at the end of the context.

    Args:
        out: the converted folder.
        source: the folder or the Hub id that it was made from.
        revision: branch, tag or commit on the Hub.
        on_note: called with sentences on what is rewritten.

    Raises:
        SourceNotFoundError: `out` is not a folder, or `source` holds no checkpoint.
        ConfigError: SOURCE's config is damaged.
        CorruptCheckpointError: SOURCE's weights cannot be opened.
        UnsupportedFamilyError: SOURCE's model type cannot be converted.
        OptionError: SOURCE cannot be rewritten as OUT's type.
    """
    out = local_path(out)
    if not out.is_dir():
        raise SourceNotFoundError(f"{out} is not a folder: name the converted checkpoint")
    checkpoint = converted = open_checkpoint(source, revision=revision, download=True)
    out_config = read_config(out)
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
        yield Inputs(out, out_config, weights, converted.config, family, original, checkpoint.config)


def _open_source(checkpoint: Checkpoint) -> Weights:
    try:
        result_dtypes = {name: _TORCH[dtype] for name, dtype in checkpoint.result_dtypes.items()}
        return Weights(checkpoint.local_folder, result_dtypes)
    except Exception as problem:
        raise CorruptCheckpointError(
            f"{checkpoint.folder} cannot be read ({first_line(problem)}): download or copy the source again"
        ) from None
