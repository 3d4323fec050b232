"""Measurements on a pretrained model, SmolLM2-135M-Instruct, and on text of several kinds."""
