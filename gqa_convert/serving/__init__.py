"""Whether serving engines compute from a checkpoint what transformers computes: each in a process of its own, as a user
would run it.
"""
