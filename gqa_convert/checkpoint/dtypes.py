"""The numpy dtypes of tensors that can be merged, and of those that can be read."""

from typing import Any, Final

import ml_dtypes
import numpy as np

from gqa_convert.checkpoint.item_bytes import ITEM_BYTES

_NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}

DTYPES: Final[dict[str, np.dtype[Any]]] = {name: np.dtype(_NUMPY[name]) for name in ITEM_BYTES}
"""NumPy dtype by safetensors name, of tensors that can be merged."""

STORED: Final = DTYPES | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U8": np.dtype(np.uint8),
}
"""NumPy dtype by safetensors name, of tensors that can be read."""
