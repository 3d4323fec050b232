"""Proves that a converted checkpoint is its source with K/V heads merged, and nothing else.

verify shares with the converter:

- the families' records, which say what a model type's tensors and config keys are called;
- loading models and tokenizers with transformers, and the loss of a text;
- the package's modelling files, whose bytes OUT's must equal;
- paths, and the download of a checkpoint from the Hub.

Everything else it computes by itself: it reads tensors with the safetensors library, finds heads in config and shapes,
cuts fused projections, merges heads, measures merge errors, derives configs and legacy config keys, translates to other
model types, and compares bits or functions. An error of the converter therefore cannot hide in verify. A test lists the
modules that this room may import.

`verify_checkpoint` in `run` leads.
"""

from gqa_convert.verify.report import Check, VerificationReport
from gqa_convert.verify.run import verify_checkpoint

__all__ = ["Check", "VerificationReport", "verify_checkpoint"]
