"""The workflow that `gqa-convert demo` runs on the bundled checkpoint."""
