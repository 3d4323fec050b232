"""What is recorded of merged layers and of their training: kept beside the layers, and passed to progress callbacks."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.provenance import Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """A merged layer."""

    module: str
    """The attention module, as the checkpoint names it."""
    head_order: tuple[int, ...] | None = None
    """The source's K/V heads in the order in which they were merged; None where every head keeps its place."""

    @property
    def errors(self) -> dict[str, float]:
        """The layer's errors by their names in the conversion's record."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRecord(LayerRecord):
    """A layer that was merged from the weights alone."""

    keys: float
    """The relative error of the attention scores, in root mean square."""
    values: float
    """The relative error of what the values produce, in root mean square."""

    @property
    def errors(self) -> dict[str, float]:
        return {f"{self.module}.keys": self.keys, f"{self.module}.values": self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedRecord(LayerRecord):
    """A layer that was merged on calibration text."""

    output: float
    """The part of the target output that the layer misses, in root mean square."""
    gap_left: float
    """The share of mean pooling's squared error that remains."""
    first_low_frequency_pair: int | None
    """The rotary pair from which on positions are ignored; None where keys have no rotary pairs, or are averaged."""

    @property
    def errors(self) -> dict[str, float]:
        return {f"{self.module}.output": self.output}


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Steps of the stage that trains all layers together."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """The stage that trains all layers together, once it has ended."""

    kl_steps: int
    """0 where the divergence was too small for the stage to be worth its time."""
    kl: Divergence
    requested_steps: int | None
    """`--kl-steps`; None where the user left the choice to the program."""


LayerDone = Callable[[int, int, LayerRecord | TrainingProgress | TrainingRecord], None]
"""Called with the number of merged layers, the number of all layers, and the record of the last one. Once all are
merged, it is called with the progress of the stage that trains them together, and at the end of that stage with its
record.
"""

_KINDS: dict[str, type[LayerRecord]] = {"weights": WeightsRecord, "calibrated": CalibratedRecord}


def layer_as_json(record: LayerRecord) -> dict[str, Any]:
    """A layer's record as plain data."""
    kind = next(name for name, each in _KINDS.items() if type(record) is each)
    return {"kind": kind} | asdict(record)


def layer_from_json(data: Mapping[str, Any]) -> LayerRecord:
    """The reverse of `layer_as_json`."""
    fields = dict(data)
    kind, order = _KINDS[fields.pop("kind")], fields.pop("head_order")
    return kind(**fields, head_order=None if order is None else tuple(order))


def training_from_json(data: Mapping[str, Any]) -> TrainingRecord:
    """A `TrainingRecord` from what `dataclasses.asdict` made of it."""
    return TrainingRecord(
        kl_steps=data["kl_steps"], kl=Divergence(**data["kl"]), requested_steps=data["requested_steps"]
    )


def recorded_order(order: npt.NDArray[np.intp]) -> tuple[int, ...] | None:
    """An order of heads as records hold it."""
    return None if (order == np.arange(len(order))).all() else tuple(order.tolist())
