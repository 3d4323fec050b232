"""What the layers are fitted on: blocks of text, pairs or sound."""
