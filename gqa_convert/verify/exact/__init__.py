"""The checks on merges that can be recomputed bit for bit: methods mean and first, copies and repeated heads."""
