"""Uptraining: recipes, the training loop, schedules, optimizers, checkpoints and launch checks."""
