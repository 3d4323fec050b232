"""The heads in a tensor of SOURCE, and the two orders of rotary rows.

Shape legend: H heads, c head_dim, d hidden_size.
"""

from typing import Any

from gqa_convert.verify.translated.target_architectures import TargetArchitecture

ROLES = ("query", "key", "value")


def split_heads(target: TargetArchitecture, tensor: Any, heads: int) -> dict[str, Any]:
    """Views [..., c, (d)] of the queries, keys and values in a fused tensor of SOURCE, whose flat order is that of the
    heads.
    """
    if target.conv and tensor.dim() == 2:
        tensor = tensor.T
    if target.layout == "per head":
        view = tensor.unflatten(0, (heads, 3, -1))
        return {role: view[:, part] for part, role in enumerate(ROLES)}
    if target.layout == "quarters":
        view = tensor.unflatten(0, (4, 3, heads // 4, -1))
        return {role: view[:, part] for part, role in enumerate(("query", "value", "key"))}
    view = tensor.unflatten(0, (3, heads, -1))
    return {role: view[part] for part, role in enumerate(ROLES)}


def to_halves(heads: Any, rotary_dim: int) -> Any:
    """Heads [H, c, ...] with rotary rows (2j, 2j + 1) moved to (j, j + rotary_dim / 2)."""
    import torch

    pairs = heads[:, :rotary_dim].unflatten(1, (rotary_dim // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, rotary_dim:]], 1)


def to_pairs(heads: Any, rotary_dim: int) -> Any:
    """The inverse of `to_halves`."""
    import torch

    halves = heads[:, :rotary_dim].unflatten(1, (2, rotary_dim // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([halves, heads[:, rotary_dim:]], 1)
