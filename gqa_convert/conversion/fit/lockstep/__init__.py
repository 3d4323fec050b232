"""The lockstep runner: runs the source and the student together over calibration text, one attention module at a time.

The interface is `LockstepRunner` and the captured modules that it yields; docs/lockstep-runner.md explains how it works
and how it fails. Code outside this folder imports from here only.
"""

from gqa_convert.conversion.fit.lockstep.captured_module import Call, CapturedModule
from gqa_convert.conversion.fit.lockstep.forward_pass import Batch
from gqa_convert.conversion.fit.lockstep.model import open_model
from gqa_convert.conversion.fit.lockstep.module_names import find_modules
from gqa_convert.conversion.fit.lockstep.offloading import offloaded_weights, running_device
from gqa_convert.conversion.fit.lockstep.runner import LockstepRunner
from gqa_convert.conversion.fit.lockstep.spilling import mapped_file
from gqa_convert.conversion.fit.lockstep.substitution import replaced, wrapped_forward

__all__ = [
    "Batch",
    "Call",
    "CapturedModule",
    "LockstepRunner",
    "find_modules",
    "mapped_file",
    "offloaded_weights",
    "open_model",
    "replaced",
    "running_device",
    "wrapped_forward",
]
