"""Rewrites a source as a stock type that computes the same before it is converted.

A module for each type (`gpt_neox`, `gpt2`) says where its tensors come from and makes its config; `other_form` collects
them as recipes, and whole tensors go through the functions of `arrays`.
"""
