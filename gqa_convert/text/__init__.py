"""Training text: sources, tokens on disk, and the samples that a training loop reads from them."""
