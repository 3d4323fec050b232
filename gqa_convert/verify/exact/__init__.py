"""The checks on merges that can be recomputed bit for bit: methods mean, first and random, copies and repeated heads."""
