"""Which number of K/V heads to convert to: loss, speed and memory by N, and what a user asks of them."""

from gqa_convert.recommending.choice import Constraints
from gqa_convert.recommending.recommendation import recommend_groups

__all__ = ["Constraints", "recommend_groups"]
