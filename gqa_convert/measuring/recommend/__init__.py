"""Chooses the number of K/V heads from loss, speed and memory by N and a user's constraints."""

from gqa_convert.measuring.recommend.choice import Constraints
from gqa_convert.measuring.recommend.run import recommend_groups

__all__ = ["Constraints", "recommend_groups"]
