"""Every fact about a model family, and how its checkpoints are loaded."""
