"""The keys under which a config.json states sizes that all architectures have."""

HIDDEN_SIZE_KEYS = ("hidden_size", "d_model", "n_embd")
VOCABULARY_KEYS = ("vocab_size", "padded_vocab_size")
