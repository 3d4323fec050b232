"""The parameters of grouped-query attention: four projections, the first three of which may be joined into one.

Shape legend: d width, H query heads, N groups (key/value heads), c head width, e head width of the values.
"""

from collections.abc import Collection
from typing import Final, Self

import torch
from torch import Tensor, nn

from gqa_convert.errors import GroupsError, OptionError

PROJECTIONS: Final = ("q", "k", "v", "out")


class GroupedProjections(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Projections to H query heads and to N key and value heads, and from the heads back to the width.

    Args:
        width: d, of the inputs and outputs.
        heads: H.
        groups: N, a divisor of H; by default H.
        head_width: c; by default d / H.
        value_head_width: e; by default c.
        key_width: width of what keys are made of; by default d.
        value_width: width of what values are made of; by default `key_width`.
        bias: True for all four projections, or the names of those with a bias among q, k, v, out.
        dropout: probability with which an attention weight is zeroed in training.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        GroupsError: N does not divide H.
        OptionError: an option is out of range or does not fit another.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int | None = None,
        *,
        head_width: int | None = None,
        value_head_width: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        bias: bool | Collection[str] = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        groups = heads if groups is None else groups
        if heads < 1 or groups < 1 or heads % groups:
            raise GroupsError(
                f"{heads} query heads cannot share {groups} key/value heads: their number must divide the heads"
            )
        if head_width is None and width % heads:
            raise OptionError(f"a width of {width} cannot be split into {heads} heads of equal width: give head_width")
        self.width, self.heads, self.groups, self.dropout = width, heads, groups, dropout
        self.head_width = width // heads if head_width is None else head_width
        self.value_head_width = self.head_width if value_head_width is None else value_head_width
        self.key_width = width if key_width is None else key_width
        self.value_width = self.key_width if value_width is None else value_width
        if min(width, self.head_width, self.value_head_width, self.key_width, self.value_width) < 1:
            raise OptionError("a width is less than 1: give positive widths")
        if not 0.0 <= dropout < 1.0:
            raise OptionError(f"dropout is {dropout}: give a probability below 1")
        biased = set(PROJECTIONS if bias is True else bias or ())
        if unknown := biased - set(PROJECTIONS):
            raise OptionError(
                f"no projection is named {', '.join(sorted(unknown))}: bias takes {', '.join(PROJECTIONS)}"
            )

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=name in biased, device=device, dtype=dtype)

        self.q_proj = linear("q", width, self._rows[0])
        self.k_proj = linear("k", self.key_width, self._rows[1])
        self.v_proj = linear("v", self.value_width, self._rows[2])
        self.out_proj = linear("out", heads * self.value_head_width, width)

    @property
    def _rows(self) -> tuple[int, int, int]:
        """Rows of the projections to queries, keys and values."""
        return self.heads * self.head_width, self.groups * self.head_width, self.groups * self.value_head_width

    @property
    def fused(self) -> bool:
        """Whether there is one projection `qkv_proj` in place of `q_proj`, `k_proj` and `v_proj`."""
        return hasattr(self, "qkv_proj")

    def fuse(self) -> Self:
        """Join the three projections into one, in place. Parameters are replaced: call it before you make an optimizer.

        Raises:
            OptionError: keys or values have another width than queries, or only some of the three have a bias.
        """
        if self.fused:
            return self
        parts = (self.q_proj, self.k_proj, self.v_proj)
        if {self.key_width, self.value_width} != {self.width}:
            raise OptionError(
                f"inputs of widths {self.width}, {self.key_width}, {self.value_width} cannot share a projection: use fused=False"
            )
        if len({part.bias is None for part in parts}) > 1:
            raise OptionError(
                "a fused projection has a bias for all of q, k, v or for none: name all three or use fused=False"
            )
        weight = torch.cat([part.weight.detach() for part in parts])
        joined = nn.Linear(
            self.width, len(weight), bias=self.q_proj.bias is not None, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            joined.weight.copy_(weight)
            if joined.bias is not None:
                joined.bias.copy_(torch.cat([part.bias for part in parts]))
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv_proj = joined
        return self

    def unfuse(self) -> Self:
        """Cut a fused projection into three, in place. Parameters are replaced, as by `fuse`."""
        if not self.fused:
            return self
        joined = self.qkv_proj
        weights = joined.weight.detach().split(self._rows)
        biases = (None,) * 3 if joined.bias is None else joined.bias.detach().split(self._rows)
        del self.qkv_proj
        for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
            part = nn.Linear(self.width, len(weight), bias=bias is not None, device=weight.device, dtype=weight.dtype)
            with torch.no_grad():
                part.weight.copy_(weight)
                if bias is not None:
                    part.bias.copy_(bias)
            setattr(self, name, part)
        return self

    def _split_heads(self, queries: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Queries [b, H, q, c], keys [b, N, k, c] and values [b, N, k, e], from the projections' outputs."""
        return [split_heads(queries, self.heads), split_heads(keys, self.groups), split_heads(values, self.groups)]


def split_heads(flat: Tensor, heads: int) -> Tensor:
    """[b, length, heads * width] as [b, heads, length, width]."""
    return flat.unflatten(-1, (heads, -1)).transpose(1, 2)
