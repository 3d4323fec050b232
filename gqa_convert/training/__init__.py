"""Parts of the uptraining loop: schedules, optimizers, losses, checkpoints, launch checks."""
