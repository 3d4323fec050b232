"""Text for training, calibration and evaluation.

The way of a training sample, from a row of a file to a batch:

1. `sources`: a `Source` names files or a Hub dataset, and `open_source` finds them.
2. `files` or `hub` read rows, and `Fields` those of their fields that hold a document.
3. `encoders` turns documents into tokens, which `token_files` keeps in the cache: a `TokenSource`.
4. `samples` finds the source of sample n by the weights. The sampler of the objective finds its
   place in the source, and makes a batch of such places (`sampler` is what all of them have in
   common, and next tokens; `span_corruption` is T5's objective, and `pairs` whole documents).

Beside this way are the keys of a recipe (`keys`), the table of objectives (`objectives`), what is
asked of a tokenizer (`model_tokenizer`), orders that are the same everywhere (`order`), and sound
(`speech`).
"""
