"""`gqa_conversion.json`, the record in every converted checkpoint: parts of it, and how it is read.

`conversion.run` writes it. `verify` reads the file by itself, since it must not trust what
wrote it.
"""

from dataclasses import dataclass

from gqa_convert.runtime.json_objects import JsonObject, Result, parse_object

from .source import Checkpoint

PROVENANCE = "gqa_conversion.json"
"""The file in every converted checkpoint that records how it was made."""
FORMAT_VERSION = 1
"""The format version of the record."""


FOUND = ("kl_steps", "kl", "left_out")
"""The fields of `CalibrationRecord` that depend on more than the calibration's inputs."""


@dataclass(frozen=True)
class BeforeAfter:
    """A number of the source and of the result: bytes or parameters."""

    before: int
    after: int


@dataclass(frozen=True)
class Divergence:
    """KL(source || result) in nats per token, of the weights as they are published, in float32, on
    text that decided nothing: before and after the stage that trains all layers together; equal
    where it changed nothing.
    """

    before: float
    after: float
    text: str
    """On which it was measured, in words."""


@dataclass(frozen=True, kw_only=True)
class CalibrationRecord(Result):
    """The calibration text that a method measured on, and what it did with it."""

    text: str
    """The file, folder or dataset, in words."""
    tokens: int
    sequence_length: int
    seed: int
    steps: int
    """Gradient steps of each layer."""
    digest: str
    """SHA-256 of the settings and of all tensors that the layers were fitted on."""
    in_bfloat16: bool = False
    """Whether products with activations were made in bfloat16; otherwise in float32."""
    kl_steps: int = 0
    """Steps of the stage that trains all layers together."""
    kl: Divergence | None = None
    """None where it was not measured."""

    left_out: tuple[str, ...] = ()
    """What was not done that is usually done, and why, in words."""
    sharded: str = ""
    """How processes divided the source's weights, in words; empty where each held all of them."""

    def inputs(self) -> JsonObject:
        """What the merged layers depend on."""
        return {key: value for key, value in self.as_json().items() if key not in FOUND}


def earlier_record(checkpoint: Checkpoint) -> JsonObject | None:
    """The record in a local checkpoint that this program made, as its file has it; None without
    one.

    Raises:
        CorruptCheckpointError: the file cannot be read.
    """
    if PROVENANCE not in checkpoint.carried:
        return None
    path = checkpoint.local_folder / PROVENANCE
    return parse_object(path.read_bytes(), str(path))
