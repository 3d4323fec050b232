"""Measurements that take minutes or hours; docs/results and docs/quality.md show what they found."""
