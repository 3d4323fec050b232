"""Chooses the number of K/V heads of each layer for a budget of K/V cache."""
