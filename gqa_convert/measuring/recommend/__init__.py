"""Which number of K/V heads to convert to: loss, speed and memory by N, and what a user asks of them."""

from gqa_convert.measuring.recommend.choice import Constraints
from gqa_convert.measuring.recommend.run import recommend_groups

__all__ = ["Constraints", "recommend_groups"]
