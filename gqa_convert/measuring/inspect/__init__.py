"""Predicts the cost of merging K/V heads, layer by layer, before anything is converted."""
