"""Carries out the methods that work on whole attention layers: layer by layer, into files that a killed run goes on
from.
"""
