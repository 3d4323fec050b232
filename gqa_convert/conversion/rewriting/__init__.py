"""Rewrites a source that is converted in another form: as a stock type that computes the same, or dequantised.

A rewriting is a table of modules and a function from config to config (`stock_form`, `decoders`, `remote_code`), or a
table of quantised tensors (`dequantising`). Whole tensors go through the functions of `arrays`.
"""
