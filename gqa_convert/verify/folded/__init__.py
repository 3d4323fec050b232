"""The checks on methods that fold maps of keys and values into queries and outputs: factor and fit.

Their tensors cannot be recomputed bit for bit, since every basis of a value head gives the same layer once the output
projection reads it in that basis. The checks compare what attention computes instead.
"""
