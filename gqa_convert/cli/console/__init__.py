"""What a person sees in a terminal: results on stdout, progress and notes on stderr."""
