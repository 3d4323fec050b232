"""What is recorded of merged layers and of their training: kept beside the layers, and passed to progress callbacks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from gqa_convert.checkpoint.provenance import Divergence
from gqa_convert.checkpoint.results import Result
from gqa_convert.checkpoint.strict_json import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord(Result, ABC):
    """A merged layer."""

    module: str
    """The attention module, as the checkpoint names it."""
    head_order: tuple[int, ...] | None = None
    """The source's K/V heads in the order in which they were merged; None where every head keeps its place."""

    @property
    @abstractmethod
    def errors(self) -> dict[str, float]:
        """The layer's errors by their names in `gqa_conversion.json`."""

    def as_json(self) -> JsonObject:
        order = {} if self.head_order is None else {"order": list(self.head_order)}
        return {"module": self.module} | order


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRecord(LayerRecord):
    """A layer that was merged from the weights alone."""

    keys: float
    """The relative error of the attention scores, in root mean square."""
    values: float
    """The relative error of what the values contribute to the output, in root mean square."""

    @property
    def errors(self) -> dict[str, float]:
        return {f"{self.module}.keys": self.keys, f"{self.module}.values": self.values}

    def as_json(self) -> JsonObject:
        return LayerRecord.as_json(self) | {"keys": self.keys, "values": self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedRecord(LayerRecord):
    """A layer that was merged on calibration text."""

    output: float
    """The part of the target output that the layer misses, in root mean square."""
    gap_left: float
    """The share of mean pooling's squared error that remains, against the source's attention of the same inputs."""
    first_low_frequency_pair: int | None
    """The rotary pair from which on positions are ignored; None where keys have no rotary pairs, or are averaged."""

    @property
    def errors(self) -> dict[str, float]:
        return {f"{self.module}.output": self.output}

    def as_json(self) -> JsonObject:
        measured = {"output": self.output, "gap_left": self.gap_left, "slow_pairs_from": self.first_low_frequency_pair}
        return LayerRecord.as_json(self) | measured


class Stage(StrEnum):
    """The stages of fitting layers on calibration text, in their order."""

    OWN_TEXT = "generating text"
    TEXT = "reading the text"
    SOURCE = "loading the source"
    FORWARD = "running source and student"
    """From the attention module before to the layer's, over all batches."""
    STATISTICS = "statistics"
    HEAD_ORDER = "head order"
    LOW_FREQUENCY = "low-frequency pairs"
    REFIT = "refit"
    GRADIENT = "gradient steps"


@dataclass(frozen=True, slots=True)
class StageProgress(Result):
    """The stage that is running, before a layer is merged."""

    stage: Stage
    layer: int
    """The number of the layer, from 1; 0 before the first."""
    layers: int
    step: int = 0
    """Steps of the stage that are done; tokens, where text is generated."""
    steps: int = 0
    """All steps of the stage; 0 where they are not counted."""

    def as_json(self) -> JsonObject:
        return {"stage": str(self.stage), "layer": [self.layer, self.layers], "step": [self.step, self.steps]}


@dataclass(frozen=True, slots=True)
class TrainingProgress(Result):
    """Steps of the stage that trains all layers together."""

    done: int
    total: int
    kl: float | None = None
    """The latest divergence from the source on held-out text, in nats per token."""

    def as_json(self) -> JsonObject:
        return {"kl_step": [self.done, self.total], "kl": self.kl}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord(Result):
    """The stage that trains all layers together, once it has ended."""

    kl_steps: int
    """0 where the divergence was too small for the stage to be worth its time."""
    kl: Divergence
    requested_steps: int | None
    """`--kl-steps`; None where the user left the choice to the program."""
    kl_rank: int
    """Of the changes of query and output projections; 0 where these were trained as they are."""
    requested_rank: int | None
    """`--kl-rank`; None where the user left the choice to the program."""

    def as_json(self) -> JsonObject:
        return asdict(self)


LayerDone = Callable[[int, int, LayerRecord | StageProgress | TrainingProgress | TrainingRecord], None]
"""Called with the number of merged layers, the number of all layers, and the record of the last one. Between layers that
are fitted on text, it is called with the stage that is running. Once all are merged, it is called with the progress of
the stage that trains them together, and at the end of that stage with its record.
"""

OnStage = Callable[[Stage, int, int], None]
"""Called with the stage of one layer that is running, its steps done and all of them, 0 where they are not counted."""


def layer_from_json(data: Mapping[str, Any]) -> LayerRecord:
    """A layer's record from its JSON."""
    order = tuple(data["order"]) if "order" in data else None
    if "output" in data:
        return CalibratedRecord(
            module=data["module"],
            head_order=order,
            output=data["output"],
            gap_left=data["gap_left"],
            first_low_frequency_pair=data["slow_pairs_from"],
        )
    return WeightsRecord(module=data["module"], head_order=order, keys=data["keys"], values=data["values"])


def training_from_json(data: Mapping[str, Any]) -> TrainingRecord:
    """A `TrainingRecord` from its JSON."""
    kl = data["kl"]
    curve = tuple((step, divergence) for step, divergence in kl["curve"])
    return TrainingRecord(
        kl_steps=data["kl_steps"],
        kl=Divergence(kl["before"], kl["after"], curve),
        requested_steps=data["requested_steps"],
        kl_rank=data["kl_rank"],
        requested_rank=data["requested_rank"],
    )


def recorded_order(order: npt.NDArray[np.intp]) -> tuple[int, ...] | None:
    """An order of heads as records hold it."""
    return None if (order == np.arange(len(order))).all() else tuple(order.tolist())
