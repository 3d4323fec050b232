"""Losses of models on text, and their distance from another model."""
