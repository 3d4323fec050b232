"""The bundled checkpoint and the story that `gqa-convert demo` tells with it."""
