"""Rewrites a source that is converted in another form: as a stock type that computes the same."""
