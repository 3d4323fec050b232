"""Text for training, calibration and evaluation: sources, tokenising, packing and order."""
