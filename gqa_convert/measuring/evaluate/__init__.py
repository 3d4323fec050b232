"""Losses of models on text, their distance from another model, and lm-eval's tasks."""
