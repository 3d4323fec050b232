"""The version, by itself so that every package may read it."""

__version__ = "0.1.0"
