"""Merging K/V heads by maps that the neighbouring projections absorb: whole attention layers in, whole attention layers
out.
"""
