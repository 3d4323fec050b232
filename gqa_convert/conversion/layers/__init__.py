"""Fits the layers of a plan to what the source does."""
