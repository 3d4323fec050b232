"""Sizes at which `fit` changes its way of computing; the estimate of its needs reads them without importing torch."""

from typing import Any, NamedTuple

from gqa_convert.checkpoint.machine import available_memory
from gqa_convert.conversion.plan import Plan
from gqa_convert.families.config_sizes import HIDDEN_SIZE_KEYS, VOCABULARY_KEYS
from gqa_convert.families.context_length import stated_count

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Of a ridge regression, relative to the mean of the Gram matrix's diagonal."""
MOST_DOUBLE_COLUMNS = 1024
"""Products of up to this many columns are made in float64; those of more in float32, and summed in float64."""
FEWER = 0.75
"""Of the rows of a weight: where merged heads have no more, products are made of them."""
ACTIVATIONS = 40
"""Roughly how many numbers a layer keeps for the backward pass, per token and unit of hidden_size."""
_WIDE = 256
"""The hidden_size from which on products take longer in float32 than the conversions between types."""
_HALF = ("F16", "BF16")
_MOST_PARAMETERS = 200_000_000
"""A CPU would need hours for more."""
_SHARE = 0.7
"""Of the free memory that the stage which trains all layers together may take."""
LOW_RANK = 32
"""Of the changes of query and output projections, where memory is too short to train these as they are."""


def may_be_reduced(plan: Plan) -> bool:
    """Whether products with activations lose nothing in bfloat16 and are large enough to gain by it: the merged layers of
    the source have 16 bits.
    """
    changed = {change.name for change in plan.changes}
    dtypes = {entry.dtype for _, name, entry in plan.checkpoint.tensors() if name in changed}
    return dtypes <= set(_HALF) and (stated_count(plan.checkpoint.config, HIDDEN_SIZE_KEYS) or 0) >= _WIDE


class TrainedModel(NamedTuple):
    """What decides the memory of the stage that trains all layers together, besides the model's own weights."""

    projected_rows: int
    """Of query and output projections, in all layers."""
    merged_rows: int
    """Of the merged key and value projections."""
    repeated_rows: int
    """Of these, with heads repeated to the source's number."""
    tokens: int
    """Of the longest sequence."""
    hidden_size: int
    layers: int
    vocabulary: int

    def trained_bytes(self, rank: int) -> int:
        """What is trained, with its gradients and moments.

        Args:
            rank: of the changes of query and output projections; 0 trains these as they are.
        """
        projected, merged, repeated = (
            rows * self.hidden_size for rows in (self.projected_rows, self.merged_rows, self.repeated_rows)
        )
        # numbers that are trained stand beside those that they began with, their gradients and two moments
        numbers = 5 * (merged if rank else merged + projected)
        if rank:
            # a change is a product of two matrices
            factors = rank * (self.projected_rows + 2 * self.layers * self.hidden_size)
            numbers += 2 * projected + 4 * factors
        return 4 * (numbers + projected + repeated)  # with copies in the modules' weights

    def backward_bytes(self, *, recomputes: bool) -> int:
        """What a sequence keeps for its backward pass, in float32, logits of student and source included.

        Args:
            recomputes: whether each layer keeps its input only.
        """
        kept = (
            (ACTIVATIONS + self.layers) * self.hidden_size
            if recomputes
            else ACTIVATIONS * self.hidden_size * self.layers
        )
        return 4 * self.tokens * (kept + 3 * self.vocabulary)

    def stage_bytes(self, rank: int, *, recomputes: bool) -> int:
        """What the stage takes: both."""
        return self.trained_bytes(rank) + self.backward_bytes(recomputes=recomputes)


def trained_model(plan: Plan, tokens: int) -> TrainedModel:
    """The sizes of a conversion's last stage.

    Args:
        plan: of the conversion.
        tokens: of the longest sequence.
    """
    config = plan.checkpoint.config
    hidden_size = hidden_size_of(plan)
    merged = [(layer.key_head_dim + layer.value_head_dim, layer, groups) for layer, groups in plan.merged_layers]
    return TrainedModel(
        projected_rows=sum(width * layer.heads for width, layer, _ in merged),
        merged_rows=sum(width * groups for width, _, groups in merged),
        repeated_rows=sum(width * layer.kv_heads for width, layer, _ in merged),
        tokens=tokens,
        hidden_size=hidden_size,
        layers=len(plan.layers),
        vocabulary=stated_count(config, VOCABULARY_KEYS) or 0,
    )


def hidden_size_of(plan: Plan) -> int:
    """As its config has it, else the width of the first layer's queries."""
    layer = plan.layers[0]
    return stated_count(plan.checkpoint.config, HIDDEN_SIZE_KEYS) or layer.heads * layer.key_head_dim


def chosen_rank(sizes: TrainedModel, place: Any, asked: int | None, *, reserved: int = 0) -> int:
    """The rank of the changes of query and output projections: that asked for, else 0, which trains these as they are, or
    `LOW_RANK` where memory is too short for that.

    Args:
        sizes: of the stage.
        place: see `has_room`, like `reserved`.
        asked: `--kl-rank`.
    """
    if asked is not None:
        return asked
    short = available_memory(place) is not None and must_recompute(sizes, place, 0, reserved=reserved) is None
    return LOW_RANK if short else 0


def has_room(parameters: int, sizes: TrainedModel, place: Any, rank: int, *, reserved: int = 0) -> bool:
    """Whether a model can be trained as a whole on a device.

    Args:
        parameters: of the model.
        sizes: of the stage.
        place: a torch device, or an object with its `type`.
        rank: as `chosen_rank` says.
        reserved: bytes of the free memory that something else will take, such as the weights of a model that is not
            loaded yet.
    """
    if place.type == "cpu" and parameters > _MOST_PARAMETERS:
        return False
    return must_recompute(sizes, place, rank, reserved=reserved) is not None


def must_recompute(sizes: TrainedModel, place: Any, rank: int, *, reserved: int = 0) -> bool | None:
    """Whether memory is too short to keep all activations of a sequence for its backward pass, so that each layer keeps
    its input and computes the others again. None if memory is too short for that as well.

    Args:
        sizes: of the stage.
        place: see `has_room`, like `rank` and `reserved`.
    """
    free = available_memory(place)
    if free is None:
        return None
    room = _SHARE * (free - reserved)
    return next((each for each in (False, True) if sizes.stage_bytes(rank, recomputes=each) < room), None)
