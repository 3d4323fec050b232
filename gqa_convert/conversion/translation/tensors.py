"""Says where every row of every tensor of a target architecture comes from, given the source's headers. Reads no weights.

Shape legend: H heads of the source, N K/V heads of the result, c head_dim, d hidden_size; a linear weight is [rows,
columns].
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from gqa_convert.checkpoint.dtypes import DTYPES
from gqa_convert.errors import ConfigError, UnsupportedFormatError
from gqa_convert.families.layouts import Role
from gqa_convert.families.source_sizes import Config, Rotary, query_scale, read_dimensions, read_rotary
from gqa_convert.families.target_architectures import ORIGINS, Origin, TargetArchitecture
from gqa_convert.merging.methods import COPY, MEAN, MergeMethod, Pooling

Shape = tuple[int, ...]


class Described(Protocol):
    """What a header tells of a tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `first`, `first + step`, ... of a source tensor (its columns, where the output tensor is `transposed`)."""

    tensor: str
    first: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """`count` consecutive output rows: `fill` everywhere, rows of the source, or the rows of several heads merged into
    one.
    """

    count: int
    sources: tuple[Rows, ...] = ()
    pooling: Pooling | None = None
    """How several sources are merged."""
    role: Role | None = None
    """Of what is merged; random numbers are drawn with the deviation of a role's rows."""
    scale: float = 1.0
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class Shift:
    """Added to a bias: the rows of the weight that it belongs to, each times `vector` (the bias of the norm in
    front).
    """

    runs: tuple[Run, ...]
    """The weight's, run for run as long as the bias's own."""
    vector: str
    columns: int


@dataclass(frozen=True, slots=True)
class Merged:
    """A tensor whose K/V heads become fewer, as a plan describes it, in the target architecture's layout."""

    roles: tuple[Role, ...]
    before: Shape
    after: Shape
    method: str
    """mean, first, random, or copy where the count stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedTensor:
    """A tensor of the result: its runs, top to bottom, and what is done to all of them in the accumulation type."""

    name: str
    dtype: str
    shape: Shape
    runs: tuple[Run, ...]
    place: str
    """The source tensor in whose file and order it belongs."""
    gain: str | None = None
    """A vector of the source that the columns are multiplied with."""
    shift: Shift | None = None
    transposed: bool = False
    merged: Merged | None = None

    @property
    def nbytes(self) -> int:
        count = DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0
        for size in self.shape:
            count *= size
        return count

    @property
    def copied_ranges(self) -> tuple[tuple[str, int, int], ...] | None:
        """(tensor, first row, rows) for each run, if all that happens is that rows are copied in order; else None."""
        if self.gain or self.shift or self.transposed:
            return None
        ranges = []
        for run in self.runs:
            if len(run.sources) != 1 or run.sources[0].step != 1 or run.scale != 1.0:
                return None
            ranges.append((run.sources[0].tensor, run.sources[0].first, run.count))
        return tuple(ranges)


@dataclass(frozen=True, slots=True)
class TranslatedAttention:
    """One attention module of the result; `kv_heads` counts the source's."""

    module: str
    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Translation:
    """All tensors of the result, and the buffers of the source that nothing reads."""

    target_architecture: TargetArchitecture
    groups: int
    tensors: tuple[TranslatedTensor, ...]
    layers: tuple[TranslatedAttention, ...]
    dropped: tuple[str, ...]


def translate_tensors(
    sources: Mapping[str, Described],
    config: Config,
    target_architecture: TargetArchitecture,
    groups: int,
    method: MergeMethod = MEAN,
) -> Translation:
    """Describe how every tensor of the target architecture is made.

    Args:
        sources: the headers of every tensor of the source, by name, in file order.
        config: the source's config.json.
        target_architecture: what `find_target_architecture` found for it.
        groups: K/V heads per layer of the result; divides the source's heads.
        method: how K/V heads are merged.

    Raises:
        ConfigError: tensors are missing, too many, or contradict the config.
        UnsupportedFormatError: a tensor that takes arithmetic has a type without any.
    """
    return _Translator(sources, config, target_architecture, groups, method).translation()


class _Translator:
    """Names and shapes of one checkpoint, and what of them has been used."""

    def __init__(
        self,
        sources: Mapping[str, Described],
        config: Config,
        target_architecture: TargetArchitecture,
        groups: int,
        method: MergeMethod,
    ) -> None:
        self.sources, self.target_architecture, self.groups, self.method = sources, target_architecture, groups, method
        self.origin: Origin = ORIGINS[target_architecture.source_type]
        self.config = config
        self.dimensions = read_dimensions(config)
        self.claimed: set[str] = set()
        embedding = f"{self.origin.names.embedding}.weight"
        prefixes = [prefix for prefix in (self.origin.names.prefix, "") if f"{prefix}{embedding}" in sources]
        if not prefixes:
            raise ConfigError(
                f"the checkpoint holds no tensor {self.origin.names.prefix}{embedding}, though its model type {target_architecture.source_type} has it: "
                "the config and the weights do not belong together"
            )
        self.old = prefixes[0]
        self.new = target_architecture.names.prefix if self.old else ""

    def translation(self) -> Translation:
        old, new = self.origin.names, self.target_architecture.names
        tensors = [
            self.copy(
                f"{self.old}{old.embedding}.weight",
                f"{self.new}{new.embedding}.weight",
                (None, self.dimensions.hidden_size),
            )
        ]
        if old.positions and new.positions:
            tensors.append(
                self.copy(
                    f"{self.old}{old.positions}.weight",
                    f"{self.new}{new.positions}.weight",
                    (None, self.dimensions.hidden_size),
                )
            )
        layers = []
        for number in range(self.dimensions.layers):
            layer = _Layer(self, number)
            tensors += layer.tensors()
            layers.append(layer.attention())
        tensors += self.norm(f"{self.old}{old.final_norm}", f"{self.new}{new.final_norm}")
        tensors += self.head()
        dropped = [name for name in self.sources if name not in self.claimed]
        for name in dropped:
            if not name.endswith(self.origin.stale):
                raise ConfigError(
                    f"tensor {name} is none that a {self.target_architecture.source_type} checkpoint with {self.dimensions.layers} layers has: "
                    "the config and the weights do not belong together"
                )
        return Translation(self.target_architecture, self.groups, tuple(tensors), tuple(layers), tuple(dropped))

    def claim(self, name: str, *shape: int | None) -> Described:
        """The header of a source tensor, which must have this shape (None: any size)."""
        if name not in self.sources:
            raise ConfigError(f"tensor {name} is missing: the checkpoint is incomplete, download or copy it again")
        found = self.sources[name]
        if len(found.shape) != len(shape) or any(
            want not in (None, size) for want, size in zip(shape, found.shape, strict=True)
        ):
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise ConfigError(
                f"tensor {name} has shape {list(found.shape)} where [{expected}] belongs: the config and the weights do not belong together"
            )
        self.claimed.add(name)
        return found

    def copy(self, old: str, new: str, shape: tuple[int | None, ...]) -> TranslatedTensor:
        entry = self.claim(old, *shape)
        return TranslatedTensor(
            name=new, dtype=entry.dtype, shape=entry.shape, runs=(Run(entry.shape[0], (Rows(old, 0),)),), place=old
        )

    def norm(self, old: str, new: str) -> Iterator[TranslatedTensor]:
        for kind in ("weight", "bias"):
            yield self.copy(f"{old}.{kind}", f"{new}.{kind}", (self.dimensions.hidden_size,))

    def filled(self, name: str, rows: int, like: str, fill: float = 0.0) -> TranslatedTensor:
        dtype = self.sources[like].dtype
        self.check_arithmetic(like, dtype)
        return TranslatedTensor(name=name, dtype=dtype, shape=(rows,), runs=(Run(rows, fill=fill),), place=like)

    def check_arithmetic(self, name: str, dtype: str) -> None:
        if dtype not in DTYPES:
            raise UnsupportedFormatError(
                f"{name} has type {dtype}, which can't be translated: save the model in one float type"
            )

    def head(self) -> Iterator[TranslatedTensor]:
        """The output projection. A checkpoint with tied embeddings may lack it, and one without a head has no bias
        either.
        """
        old, new = self.origin.names, self.target_architecture.names.heads[0]
        embedding = f"{self.old}{old.embedding}.weight"
        vocabulary = self.sources[embedding].shape[0]
        name = next((f"{head}.weight" for head in old.heads if f"{head}.weight" in self.sources), None)
        if name:
            yield self.copy(name, f"{new}.weight", (None, self.dimensions.hidden_size))
            vocabulary = self.sources[name].shape[0]
        elif not self.config.get("tie_word_embeddings", self.origin.tied) and self.old:
            self.claim(f"{old.heads[0]}.weight", None, self.dimensions.hidden_size)  # raises: it is missing
        if self.target_architecture.head_bias and (name or self.old):
            bias = f"{(name or 'lm_head.weight').removesuffix('.weight')}.bias"
            if self.origin.head_bias and bias in self.sources:
                yield self.copy(bias, f"{new}.bias", (vocabulary,))
            else:
                yield self.filled(f"{new}.bias", vocabulary, name or embedding)


class _Layer:
    """One layer's tensors."""

    def __init__(self, all_: _Translator, number: int) -> None:
        self.all = all_
        self.number = number
        self.old, self.new = all_.origin.names, all_.target_architecture.names
        self.old_base = f"{all_.old}{self.old.layers}.{number}."
        self.new_base = f"{all_.new}{self.new.layers}.{number}."
        self.old_attention = f"{self.old_base}{self.old.attention}."
        self.new_attention = f"{self.new_base}{self.new.attention}."
        self.size = all_.dimensions
        rotary = read_rotary(all_.config, self.size) if all_.origin.interleaved else None
        self.rotated = rotary.rotated if isinstance(rotary, Rotary) else 0

    def attention(self) -> TranslatedAttention:
        dtype = self.all.sources[f"{self.old_attention}{self.old.fused or self.old.key}.weight"].dtype
        return TranslatedAttention(
            self.new_attention[:-1], self.size.heads, self.size.head_dim, self.size.head_dim, dtype
        )

    def tensors(self) -> Iterator[TranslatedTensor]:
        old, new, size = self.old, self.new, self.size
        hidden, inner = size.hidden_size, size.intermediate_size
        first = f"{self.old_base}{old.attention_norm}"
        second = f"{self.old_base}{old.mlp_norm}" if old.mlp_norm else first
        folds = self.all.target_architecture.folds_norms
        if folds:
            yield from self.neutral_norm(first, f"{self.new_base}{new.attention_norm}")
            for kind in ("weight", "bias"):
                self.all.claim(f"{second}.{kind}", hidden)
        else:
            yield from self.all.norm(first, f"{self.new_base}{new.attention_norm}")
            if old.mlp_norm and new.mlp_norm:
                yield from self.all.norm(second, f"{self.new_base}{new.mlp_norm}")
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
        """A norm that only normalises: its gain and bias are folded into the projections behind it."""
        for kind, fill in (("weight", 1.0), ("bias", 0.0)):
            self.all.claim(f"{old}.{kind}", self.size.hidden_size)
            yield self.all.filled(f"{new}.{kind}", self.size.hidden_size, f"{old}.{kind}", fill)

    def linear(
        self, old: str, new: str, rows: int, columns: int, *, biased: bool, folded: str | None
    ) -> Iterator[TranslatedTensor]:
        """A projection whose rows keep their order."""
        weights = (Run(rows, (Rows(f"{old}.weight", 0),)),)
        self.claim_weight(f"{old}.weight", rows, columns)
        yield self.weight(f"{new}.weight", weights, f"{old}.weight", rows, columns, folded)
        bias = f"{old}.bias"
        runs: tuple[Run, ...] = (Run(rows),)
        if biased:
            self.all.claim(bias, rows)
            runs = (Run(rows, (Rows(bias, 0),)),)
        yield self.bias(f"{new}.bias", runs, weights, f"{old}.weight", rows, columns, folded)

    @property
    def attention_biased(self) -> bool:
        """GPT-NeoX may have an attention without biases, and then passes over those on disk; its MLP always has
        them.
        """
        return self.all.origin.attention_biases and bool(self.all.config.get("attention_bias", True))

    def claim_weight(self, name: str, rows: int, columns: int) -> None:
        entry = self.all.claim(name, *((columns, rows) if self.all.origin.family.transposed else (rows, columns)))
        self.all.check_arithmetic(name, entry.dtype)

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
            dtype=self.all.sources[place].dtype,
            shape=(rows, columns),
            runs=_joined(runs),
            place=place,
            gain=f"{folded}.weight" if folded else None,
            transposed=self.all.origin.family.transposed,
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
        """A bias; with a folded norm, plus the weight times the norm's bias."""
        source = next((rows.tensor for run in runs for rows in run.sources), None)
        dtype = self.all.sources[source or weight].dtype
        self.all.check_arithmetic(source or weight, dtype)
        shift = Shift(weights, f"{folded}.bias", columns) if folded else None
        return TranslatedTensor(
            name=name,
            dtype=dtype,
            shape=(rows,),
            runs=runs if shift else _joined(runs),
            place=source or weight,
            shift=shift,
            merged=merged,
        )

    def heads(self, folded: str | None) -> Iterator[TranslatedTensor]:
        """Queries, keys and values, moved from the source's layout to the target architecture's."""
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
            weights[role] = self.head_runs(f"{module}.weight", role)
            biases[role] = tuple(Run(run.count) for run in weights[role])
            bias = f"{module}.bias"
            if self.attention_biased:
                self.all.claim(bias, size.hidden_size * (3 if old.fused else 1))
                biases[role] = self.head_runs(bias, role)
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
        used = COPY if self.all.groups == self.size.heads else self.all.method
        return Merged(found, (self.size.hidden_size * len(roles), *columns), (rows, *columns), used.name)

    def head_runs(self, tensor: str, role: Role) -> tuple[Run, ...]:
        """The rows of every head of a role, K/V heads merged to `groups`: contiguous heads share a group."""
        size = self.size
        groups = size.heads if role == "query" else self.all.groups
        together = size.heads // groups
        scale = query_scale(self.all.config, size, self.number) if role == "query" else 1.0
        runs = []
        for first in range(0, size.heads, together):
            starts = [self.head_start(head, role) for head in range(first, first + together)]
            for offset, step, count in self.order(role):
                sources = tuple(Rows(tensor, start + offset, step) for start in starts)
                pooling = self.all.method.pooling if together > 1 else None
                runs.append(Run(count, sources, pooling, role if pooling else None, scale))
        return tuple(runs)

    def head_start(self, head: int, role: Role) -> int:
        """The first row of a head in the source."""
        c, hidden = self.size.head_dim, self.size.hidden_size
        layout = self.all.origin.fused_layout
        if layout == "grouped":
            return (3 * head + ("query", "key", "value").index(role)) * c
        if layout == "quarters":
            block, inside = divmod(head, self.size.heads // 4)
            return (3 * block + ("query", "value", "key").index(role)) * (hidden // 4) + inside * c
        if layout == "blocks":
            return ("query", "key", "value").index(role) * hidden + head * c
        return head * c

    def order(self, role: Role) -> tuple[tuple[int, int, int], ...]:
        """(first, step, count) of the runs in which a head's rows are read: rotary pairs (2j, 2j + 1) become (j, j +
        rotated/2).
        """
        c, rotated = self.size.head_dim, self.rotated
        if not rotated or role == "value":
            return ((0, 1, c),)
        pairs = ((0, 2, rotated // 2), (1, 2, rotated // 2))
        return (*pairs, (rotated, 1, c - rotated)) if rotated < c else pairs


def _joined(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The same rows in as few runs as possible: heads that are not merged and follow one another, and zeros."""
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
