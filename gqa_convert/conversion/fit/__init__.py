"""Runs the methods that work on whole attention layers, layer by layer, into files from which a killed run resumes."""
