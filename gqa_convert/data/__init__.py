"""Text for training, calibration and evaluation.

The way of a training sample, from a row of a file to a batch:

1. `sources`: a `Source` names files or a Hub dataset, and `open_source` finds them.
2. `files` or `hub` read rows, and `documents` says which of their fields hold a document.
3. `encoders` turns documents into tokens, which `token_files` keeps in the cache: a `TokenSource`.
4. `samples` finds the source of sample n by the weights (`order`). The sampler of the objective
   finds its place in the source, and makes a batch of such places (`sampler` is what all of them
   have in common, `causal` next tokens, `span_corruption` T5's, `pairs` whole documents).

Beside this way are the keys of a recipe (`keys`), the table of objectives (`objectives`), what is
asked of a tokenizer (`model_tokenizer`), and sound (`speech`).
"""
