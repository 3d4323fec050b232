"""Checkpoints of families without a K/V-head count, rewritten exactly for stock classes that have one."""
