"""A converted checkpoint on the Hub: its model card, made from what is recorded and nothing else, and its upload."""
