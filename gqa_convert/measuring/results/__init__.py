"""The JSON files that the commands write, read back as typed records."""
