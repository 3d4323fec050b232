"""What a person sees, on stderr: progress, tables, summaries. Scripts read stdout, where only `--json` writes."""
