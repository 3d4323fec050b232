"""What the layers are fitted on: text, pairs of texts, or sound.

The way of a sample, from a file to a batch:

1. `batches` opens what the user named. What does not exist is refused here.
2. `own_text` adds what the source is to write itself, and `mixture` other kinds of text.
3. `text` turns each text into one row of tokens, and `blocks` draws blocks from all rows in turn.
   `pairs` draws whole pairs instead, and `speech` windows of sound.
4. All three make batches of what they drew: the arguments of the model's forward pass, without
   padding.

They take a `Request` and give a `Calibration` (`streams`), which has four streams of batches
without a sample in common: `fitted`, `validation`, `held_out` and `fresh`.
"""
