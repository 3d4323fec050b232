"""The records of all families, one file for each kind of architecture. `families.table` puts them together."""
