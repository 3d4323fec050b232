"""Checkpoints on disk and on the Hub: reading headers, copying byte ranges, and publishing a folder whole or not at all."""
