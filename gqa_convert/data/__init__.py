"""Text for training, calibration and evaluation.

The way of a sample: a `Source` names files or a Hub dataset (`sources`), whose rows are read as documents (`files`, `hub`,
`documents`). An encoder (`encoders`) turns documents into tokens, which a `TokenSource` maps from the cache
(`token_files`). `Samples` finds the source of sample n by the weights (`order`), the sampler of the objective
(`objectives`) finds its place in the source and makes a batch of such places (`causal`, `span_corruption`, `pairs`;
`sampler` is what they have in common).
"""
