"""Modelling files for families whose attention has no K/V-head count in transformers; each is copied into the checkpoints it serves."""
