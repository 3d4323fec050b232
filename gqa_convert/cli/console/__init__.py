"""What a person sees: results on stdout; progress and notes on stderr."""
