"""SOURCE's tensors as the formulas of a translation read them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gqa_convert.verify.checkpoint_reader import Weights
from gqa_convert.verify.exact.merge_errors import MergeErrors
from gqa_convert.verify.report import Failure
from gqa_convert.verify.translated.sizes import Sizes
from gqa_convert.verify.translated.target_architectures import TargetArchitecture


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor of OUT must be: `value` rounded to `dtype`, bit for bit unless there is a `slack`."""

    value: Any
    dtype: Any
    slack: Any = None
    """How far OUT may be off, number for number, beyond half a unit in the last place, which any rounding makes."""


Formula = Callable[[], Expected]


class SourceTensors:
    """SOURCE's tensors, and a record of those that were used.

    Args:
        source: SOURCE's tensors.
        config: SOURCE's config.
        target: the translation.
        sizes: SOURCE's sizes.
        groups: K/V heads of OUT.
        method: mean or first; ignored where heads are copied.
    """

    def __init__(
        self,
        source: Weights,
        config: dict[str, Any],
        target: TargetArchitecture,
        sizes: Sizes,
        groups: int,
        method: Any,
    ) -> None:
        self.source, self.config, self.target, self.sizes = source, config, target, sizes
        self.groups, self.method = groups, method
        prefixed = f"{target.old.prefix}{target.old.embedding}.weight" in source.file_of
        self.old_prefix = target.old.prefix if prefixed else ""
        """Checkpoints of the layers alone have no prefix, and neither have some with a head."""
        self.new_prefix = target.new.prefix if prefixed else ""
        self.biased = target.biased and bool(config.get("attention_bias", True))
        """Whether SOURCE's attention has biases."""
        self.errors = MergeErrors()
        """The merge error of each tensor of OUT whose formula was evaluated."""
        self.used: set[str] = set()
        """Tensors of SOURCE that a formula reads."""

    @property
    def changed(self) -> bool:
        """Whether OUT has fewer K/V heads than SOURCE."""
        return self.groups != self.sizes.heads

    def whole(self, name: str) -> Any:
        """A tensor of SOURCE."""
        if name not in self.source.file_of:
            raise Failure(f"SOURCE has no {name}, from which OUT's tensors follow")
        return self.source.whole(name)

    def copy(self, old: str, new: str, kinds: tuple[str, ...]) -> dict[str, Formula]:
        """The formulas of a module that is copied.

        Args:
            old: SOURCE's module.
            new: OUT's module.
            kinds: weight, bias or both.
        """
        self.used.update(f"{old}.{kind}" for kind in kinds)
        return {f"{new}.{kind}": lambda kind=kind: self._same(f"{old}.{kind}") for kind in kinds}  # type: ignore[misc]

    def _same(self, name: str) -> Expected:
        tensor = self.whole(name)
        return Expected(tensor, tensor.dtype)

    def constant(self, value: float, like: str) -> Expected:
        """As many equal numbers as SOURCE's tensor `like` has rows, in its type."""
        import torch

        dtype = self.source.dtype(like)
        return Expected(torch.full((self.source.shape(like)[0],), value, dtype=dtype), dtype)
