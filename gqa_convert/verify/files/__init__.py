"""The checks on files other than configs: complete weights, the index, carried files and the provenance record."""
