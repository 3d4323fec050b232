"""Measurements that take minutes or hours; docs/results and docs/results/README.md show what
they found.
"""
