"""Checkpoints of types that load by code of their own, rewritten exactly as checkpoints of stock types."""
