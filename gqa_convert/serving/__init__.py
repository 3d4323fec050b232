"""Compares serving engines with transformers on a checkpoint, each in a separate process."""
