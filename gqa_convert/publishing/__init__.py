"""Publishes a converted checkpoint on the Hub: its model card, made from recorded facts alone, and its upload."""
