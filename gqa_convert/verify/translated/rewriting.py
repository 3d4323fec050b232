"""All tensors of a translated OUT, computed from SOURCE's in torch: one formula per tensor, one layer at a time."""

import re
from collections.abc import Iterator

from gqa_convert.verify.translated.layer import Layer
from gqa_convert.verify.translated.source_tensors import Formula, SourceTensors


class Rewriting(SourceTensors):
    """The formulas of all of OUT's tensors."""

    def layer(self, number: int) -> Layer:
        """One layer, which reads SOURCE anew."""
        return Layer(self, number)

    def parts(self) -> Iterator[dict[str, Formula]]:
        """The formulas of each layer, then of all other tensors. Only their evaluation reads tensors."""
        for number in range(self.sizes.layers):
            yield self.layer(number).formulas()
        yield self._outside()

    def _outside(self) -> dict[str, Formula]:
        old, new = self.target.old, self.target.new
        formulas = self.copy(f"{self.old_prefix}{old.embedding}", f"{self.new_prefix}{new.embedding}", ("weight",))
        if old.positions:
            formulas |= self.copy(f"{self.old_prefix}{old.positions}", f"{self.new_prefix}{new.positions}", ("weight",))
        formulas |= self.copy(
            f"{self.old_prefix}{old.last_norm}", f"{self.new_prefix}{new.last_norm}", ("weight", "bias")
        )
        head = next((name for name in old.logits if f"{name}.weight" in self.source.file_of), None)
        if head:
            formulas |= self.copy(head, new.logits[0], ("weight",))
        if self.target.logits_bias and (head or self.old_prefix):
            formulas |= self._logits_bias(head)
        return formulas

    def _logits_bias(self, head: str | None) -> dict[str, Formula]:
        """The bias of OUT's logits: SOURCE's, or zeros."""
        old, new = self.target.old, self.target.new
        own = head or new.logits[0]
        if self.target.source != "gpt_neox" and f"{own}.bias" in self.source.file_of:
            return self.copy(own, new.logits[0], ("bias",))
        like = f"{head}.weight" if head else f"{self.old_prefix}{old.embedding}.weight"
        return {f"{new.logits[0]}.bias": lambda: self.constant(0.0, like)}

    def unused(self) -> tuple[list[str], list[str]]:
        """Tensors of SOURCE that no formula reads: known buffers, and others. Valid once `parts` is exhausted."""
        old = self.target.old
        buffers = "|".join(re.escape(name) for name in self.target.buffers)
        known = re.compile(rf"(?:.*\.)?{old.layers}\.\d+\.{old.attention}\.(?:{buffers})")
        left = sorted(self.source.file_of.keys() - self.used)
        return [name for name in left if known.fullmatch(name)], [name for name in left if not known.fullmatch(name)]
