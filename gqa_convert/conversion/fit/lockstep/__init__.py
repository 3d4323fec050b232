"""Calibration: text through a model, and the statistics of its activations."""
