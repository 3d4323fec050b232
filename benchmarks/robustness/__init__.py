"""Mutated inputs, killed commands and hostile surroundings, with a table of what happened.

    python -m benchmarks.robustness --mutations 10000 --kills 200

docs/verification.md has the totals. Every case follows from the seed, except for the moment at which a kill arrives.
"""
