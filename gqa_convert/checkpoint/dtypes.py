"""The numpy dtypes of tensors that can be read, and rounding to them."""

from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows its types by name then
import numpy as np

from gqa_convert.errors import NonFiniteError

_NUMPY = {
    "F16": "f2",
    "F32": "f4",
    "F64": "f8",
    "C64": "c8",
    "BOOL": "?",
    "I8": "i1",
    "I16": "i2",
    "I32": "i4",
    "I64": "i8",
    "U8": "u1",
    "U16": "u2",
    "U32": "u4",
    "U64": "u8",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
STORED: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for name, dtype in _NUMPY.items()}
"""NumPy dtype by safetensors name, of tensors that can be read."""

TORCH = {f"torch.{dtype.name}": name for name, dtype in STORED.items()}
"""Safetensors name by the name of torch's type, of tensors that can be read."""


def rounded(array: Any, name: str, dtype: str) -> Any:
    """An array in a type, by its safetensors name.

    Args:
        array: of numbers.
        name: of the tensor, for the message.
        dtype: the type.

    Raises:
        NonFiniteError: a number is too large for it.
    """
    if array.dtype == STORED[dtype]:
        return array
    with np.errstate(over="ignore"):
        found = array.astype(STORED[dtype])
    if np.isfinite(array).all() and not np.isfinite(found).all():
        raise NonFiniteError(
            f"tensor {name} would hold numbers too large for {dtype}: "
            "save the model as bfloat16 or float32 first"
        )
    return found
