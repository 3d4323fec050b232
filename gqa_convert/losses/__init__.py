"""Losses of predictions on text, computed without ever holding all logits of a batch."""
