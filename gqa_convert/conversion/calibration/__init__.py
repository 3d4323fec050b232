"""What the layers are fitted on: text, pairs of texts, or sound.

The way of a sample, from a file to a batch:

1. `batches` opens what the user named. What does not exist is refused here.
2. Of running text, `texts` makes one row of tokens from each source. `mixture` adds other kinds,
   among them what `own_text` lets the source write, and `text` has `blocks` draw from all rows in
   turn. `pairs` draws whole pairs instead, and `speech` windows of sound.
3. All three make batches of what they drew: the arguments of the model's forward pass, without
   padding.

They take a `Request` and give a `Calibration` (`streams`), which has four streams of batches
without a sample in common: `fitted`, `validation`, `held_out` and `fresh`.
"""
