"""The training objectives: what a model learns to predict, and from which data.

An objective is one entry of `OBJECTIVES` and one class, which encodes documents and makes batches.
docs/developing.md says what belongs to a new one.
"""

from .pairs import PairSampler
from .sampler import CausalSampler, Sampler, SampleSettings
from .span_corruption import SpanSampler

OBJECTIVES: dict[str, type[Sampler]] = {
    "causal": CausalSampler,
    "span_corruption": SpanSampler,
    "pairs": PairSampler,
}
"""The objectives by name. `auto` takes the first one that suits a model and the data."""


def make_sampler(settings: SampleSettings) -> Sampler:
    """The sampler of an objective.

    Raises:
        DataError: the tokenizer lacks a token that it needs, or the length does not allow a sample.
    """
    return OBJECTIVES[settings.objective](settings)
