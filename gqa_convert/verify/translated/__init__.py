"""The checks on results of another model type than their source: every tensor and config entry is computed anew."""
