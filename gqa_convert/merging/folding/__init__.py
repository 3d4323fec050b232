"""Merging the K/V heads of whole attention layers, with maps folded into the query and output projections."""
