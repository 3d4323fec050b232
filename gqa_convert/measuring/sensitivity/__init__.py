"""Measures what merging K/V heads costs before anything is converted, and chooses how many to
keep.
"""
