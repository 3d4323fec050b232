"""Checkpoints on disk and on the Hub: reading their headers, copying byte ranges, publishing a folder whole or not at
all.
"""
