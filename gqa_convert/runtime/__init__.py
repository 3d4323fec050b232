"""The machine, paths, and JSON and sizes in messages: what knows no checkpoint."""
