"""Describes the tensors of one layer of the target architecture in terms of the source's tensors.

Shape legend: H attention heads of the source, N K/V heads of the result, c head_dim, d hidden_size. A linear weight is
[rows, columns].
"""

from collections.abc import Iterator
from itertools import pairwise

from gqa_convert.conversion.translation.description import (
    Merged,
    Rows,
    Run,
    Shift,
    TranslatedAttention,
    TranslatedTensor,
)
from gqa_convert.conversion.translation.head_rows import HeadRows
from gqa_convert.conversion.translation.source_tensors import SourceTensors
from gqa_convert.families.layouts import Role
from gqa_convert.merging.methods import COPY


class LayerTranslation:
    """Describes the tensors of one layer.

    Args:
        source: the source tensors of the translation.
        number: the index of the layer.
    """

    def __init__(self, source: SourceTensors, number: int) -> None:
        self.source = source
        self.rows = HeadRows(source, number)
        self.old, self.new = source.origin.names, source.target_architecture.names
        self.old_base = f"{source.old}{self.old.layers}.{number}."
        self.new_base = f"{source.new}{self.new.layers}.{number}."
        self.old_attention = f"{self.old_base}{self.old.attention}."
        self.new_attention = f"{self.new_base}{self.new.attention}."
        self.size = source.dimensions

    def attention(self) -> TranslatedAttention:
        dtype = self.source.sources[f"{self.old_attention}{self.old.fused or self.old.key}.weight"].dtype
        return TranslatedAttention(
            self.new_attention[:-1], self.size.heads, self.size.head_dim, self.size.head_dim, dtype
        )

    def tensors(self) -> Iterator[TranslatedTensor]:
        old, new, size = self.old, self.new, self.size
        hidden, inner = size.hidden_size, size.intermediate_size
        first = f"{self.old_base}{old.attention_norm}"
        second = f"{self.old_base}{old.mlp_norm}" if old.mlp_norm else first
        folds = self.source.target_architecture.folds_norms
        if folds:
            yield from self.neutral_norm(first, f"{self.new_base}{new.attention_norm}")
            for kind in ("weight", "bias"):
                self.source.claim(f"{second}.{kind}", hidden)
        else:
            yield from self.source.norm(first, f"{self.new_base}{new.attention_norm}")
            if old.mlp_norm and new.mlp_norm:
                yield from self.source.norm(second, f"{self.new_base}{new.mlp_norm}")
        yield from self.heads(first if folds else None)
        biased = self.attention_biased
        output = self.old_attention + old.output
        yield from self.linear(output, self.new_attention + new.output, hidden, hidden, biased=biased, folded=None)
        yield from self.linear(
            self.old_base + old.up, self.new_base + new.up, inner, hidden, biased=True, folded=second if folds else None
        )
        yield from self.linear(
            self.old_base + old.down, self.new_base + new.down, hidden, inner, biased=True, folded=None
        )

    def neutral_norm(self, old: str, new: str) -> Iterator[TranslatedTensor]:
        """A norm with gain 1 and bias 0, whose original gain and bias are folded into the projections that follow."""
        for kind, fill in (("weight", 1.0), ("bias", 0.0)):
            self.source.claim(f"{old}.{kind}", self.size.hidden_size)
            yield self.source.filled(f"{new}.{kind}", self.size.hidden_size, f"{old}.{kind}", fill)

    def linear(
        self, old: str, new: str, rows: int, columns: int, *, biased: bool, folded: str | None
    ) -> Iterator[TranslatedTensor]:
        """A projection whose rows keep the source's order."""
        weights = (Run(rows, (Rows(f"{old}.weight", 0),)),)
        self.claim_weight(f"{old}.weight", rows, columns)
        yield self.weight(f"{new}.weight", weights, f"{old}.weight", rows, columns, folded)
        bias = f"{old}.bias"
        runs: tuple[Run, ...] = (Run(rows),)
        if biased:
            self.source.claim(bias, rows)
            runs = (Run(rows, (Rows(bias, 0),)),)
        yield self.bias(f"{new}.bias", runs, weights, f"{old}.weight", rows, columns, folded)

    @property
    def attention_biased(self) -> bool:
        """Whether the attention has biases. GPT-NeoX may disable them, and then ignores attention biases in the
        checkpoint; its MLP always has biases.
        """
        return self.source.origin.attention_biases and bool(self.source.config.get("attention_bias", True))

    def claim_weight(self, name: str, rows: int, columns: int) -> None:
        entry = self.source.claim(name, *((columns, rows) if self.source.origin.family.transposed else (rows, columns)))
        self.source.check_arithmetic(name, entry.dtype)

    def weight(
        self,
        name: str,
        runs: tuple[Run, ...],
        place: str,
        rows: int,
        columns: int,
        folded: str | None,
        merged: Merged | None = None,
    ) -> TranslatedTensor:
        return TranslatedTensor(
            name=name,
            dtype=self.source.sources[place].dtype,
            shape=(rows, columns),
            runs=joined(runs),
            place=place,
            gain=f"{folded}.weight" if folded else None,
            transposed=self.source.origin.family.transposed,
            merged=merged,
        )

    def bias(
        self,
        name: str,
        runs: tuple[Run, ...],
        weights: tuple[Run, ...],
        weight: str,
        rows: int,
        columns: int,
        folded: str | None,
        merged: Merged | None = None,
    ) -> TranslatedTensor:
        """A bias. If the norm before it is folded, the product of the weight and the norm's bias is added."""
        source = next((rows.tensor for run in runs for rows in run.sources), None)
        dtype = self.source.sources[source or weight].dtype
        self.source.check_arithmetic(source or weight, dtype)
        shift = Shift(weights, f"{folded}.bias", columns) if folded else None
        return TranslatedTensor(
            name=name,
            dtype=dtype,
            shape=(rows,),
            runs=runs if shift else joined(runs),
            place=source or weight,
            shift=shift,
            merged=merged,
        )

    def heads(self, folded: str | None) -> Iterator[TranslatedTensor]:
        """The query, key and value tensors, rearranged from the source's layout to the target architecture's."""
        old, new, size = self.old, self.new, self.size
        parts: tuple[tuple[Role, str | None, str | None], ...] = (
            ("query", old.query, new.query),
            ("key", old.key, new.key),
            ("value", old.value, new.value),
        )
        for fused in (old.fused,) if old.fused else (old.query, old.key, old.value):
            rows = size.hidden_size * (3 if old.fused else 1)
            self.claim_weight(f"{self.old_attention}{fused}.weight", rows, size.hidden_size)
        weights: dict[Role, tuple[Run, ...]] = {}
        biases: dict[Role, tuple[Run, ...]] = {}
        for role, separate, _ in parts:
            module = f"{self.old_attention}{old.fused or separate}"
            weights[role] = self.rows.runs(f"{module}.weight", role)
            biases[role] = tuple(Run(run.count) for run in weights[role])
            bias = f"{module}.bias"
            if self.attention_biased:
                self.source.claim(bias, size.hidden_size * (3 if old.fused else 1))
                biases[role] = self.rows.runs(bias, role)
        if new.fused:
            kept: tuple[tuple[str, tuple[Role, ...]], ...] = ((new.fused, ("query", "key", "value")),)
        else:
            kept = tuple((target, (role,)) for role, _, target in parts if target)
        for target, roles in kept:
            place = weights[roles[0]][0].sources[0].tensor
            weight_runs = tuple(run for role in roles for run in weights[role])
            bias_runs = tuple(run for role in roles for run in biases[role])
            rows, name = sum(run.count for run in weight_runs), f"{self.new_attention}{target}"
            yield self.weight(
                f"{name}.weight",
                weight_runs,
                place,
                rows,
                size.hidden_size,
                folded,
                self.merged(roles, rows, size.hidden_size),
            )
            real = self.merged(roles, rows) if any(run.sources for run in bias_runs) else None
            yield self.bias(f"{name}.bias", bias_runs, weight_runs, place, rows, size.hidden_size, folded, real)

    def merged(self, roles: tuple[Role, ...], rows: int, *columns: int) -> Merged | None:
        found = tuple(role for role in roles if role != "query")
        if not found:
            return None
        used = COPY if self.source.groups == self.size.heads else self.source.method
        return Merged(found, (self.size.hidden_size * len(roles), *columns), (rows, *columns), used.name)


def joined(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The same rows in as few runs as possible; adjacent unmerged heads and adjacent zero rows are joined."""
    joined: list[Run] = list(runs[:1])
    for before, run in pairwise(runs):
        last = joined[-1]
        plain = (
            len(run.sources) == len(before.sources) == 1
            and run.sources[0].step == last.sources[0].step == 1
            and run.scale == last.scale
        )
        if plain and run.sources[0] == Rows(last.sources[0].tensor, last.sources[0].first + last.count):
            joined[-1] = Run(last.count + run.count, last.sources, scale=last.scale)
        elif not run.sources and not last.sources and run.fill == last.fill:
            joined[-1] = Run(last.count + run.count, fill=last.fill)
        else:
            joined.append(run)
    return tuple(joined)
