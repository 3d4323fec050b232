"""Checkpoints on disk and on the Hub, as they are read: files, formats, headers, tensors, and the
record of a conversion.
"""
