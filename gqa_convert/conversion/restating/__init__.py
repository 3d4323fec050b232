"""Rewrites checkpoints that load by custom code exactly as checkpoints of stock types."""
