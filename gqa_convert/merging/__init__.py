"""The maths of merging K/V heads: arrays in, arrays out, without files or torch."""
