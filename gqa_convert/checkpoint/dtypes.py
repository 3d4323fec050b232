"""The numpy dtypes of tensors that can be read."""

from typing import Any

import ml_dtypes
import numpy as np

_REALS: dict[str, Any] = {"F16": "f2", "F32": "f4", "F64": "f8", "C64": "c8", "BOOL": "?"}
_INTEGERS = {"I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8", "U8": "u1", "U16": "u2", "U32": "u4", "U64": "u8"}
_OTHERS = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}

STORED: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for name, dtype in (_REALS | _INTEGERS | _OTHERS).items()}
"""NumPy dtype by safetensors name, of tensors that can be read."""

TORCH = {f"torch.{dtype.name}": name for name, dtype in STORED.items()}
"""Safetensors name by the name of torch's type, of tensors that can be read."""
