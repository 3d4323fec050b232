"""The dtypes of tensors that can be merged."""

from typing import Any, Final

import ml_dtypes
import numpy as np

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""NumPy dtype by safetensors name."""
