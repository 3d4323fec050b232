"""Scores a model on text: windows, batches and the forward pass."""
