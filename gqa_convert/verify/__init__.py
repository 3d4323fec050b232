"""Proves that a converted checkpoint is its source with K/V heads merged, and nothing else.

The proof has two halves. What is stored: every tensor that a conversion leaves alone has SOURCE's
bytes, and every K/V head is what the method makes of its group, as far as that can be said from the
heads alone. What is computed: OUT equals SOURCE with OUT's heads repeated, and no attention module
of a fitted result is far worse than with mean pooling.

verify shares with the converter the families' records, the legacy config keys, the rewriting of
sources, loading models with transformers, the package's modelling files, whose bytes OUT's must
equal, and paths, texts and downloads. It reads tensors, finds heads and merges them by its own
code, so that an error of the converter cannot hide in it. A test lists the modules that this
package may import.

`verify_checkpoint` in `run` leads.
"""

from .report import Check, VerificationReport
from .run import verify_checkpoint

__all__ = ["Check", "VerificationReport", "verify_checkpoint"]
