"""Rewrites checkpoints of families without a K/V-head count for stock classes that have one and compute the same."""
