"""The checks on what the models compute. transformers loads both models, one in memory at a time.

Of the code in checkpoints, only modelling files that equal this package's own run.
"""
