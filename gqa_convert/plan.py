"""From a checkpoint's config and tensor headers to a complete plan: every output byte is named before the first one is written.

Everything that can be refused without reading weights is refused here. The plan holds no arrays and needs no torch.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.errors import GroupsError, OptionError
from gqa_convert.families import Family, Modeling, find_family
from gqa_convert.geometry import AttentionFinder, AttentionLayer, Place
from gqa_convert.layouts import Role, Section
from gqa_convert.merging.pooling import DTYPES, METHODS, Method
from gqa_convert.translation.homes import Home, NoHome, engines_for, find_home, translate_config
from gqa_convert.translation.tensors import TranslatedTensor, translate_tensors


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of output bytes: copied from one source range, or merged from several of the same length.

    `ranges` holds (shard number, byte offset in that file); `method` is None for a copy.
    """

    ranges: tuple[tuple[int, int], ...]
    nbytes: int
    method: Method | None = None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor of the result and the pieces whose bytes, one behind the other, are its own.

    Where heads lie along the last axis (Conv1D), the pieces are those of one row; each of the `rows` is made of them, and the ranges
    move on by `stride` bytes from one to the next. A tensor of a translation that takes arithmetic has no pieces, but its description.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rows: int = 1
    stride: int = 0
    translated: TranslatedTensor | None = None

    @property
    def nbytes(self) -> int:
        if self.translated:
            return self.translated.nbytes
        return self.rows * sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor whose K/V heads change in number: what it is, and its shape before and after."""

    name: str
    module: str
    roles: tuple[Role, ...]
    dtype: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    method: str
    """mean, first, random, repeat or copy."""


@dataclass(frozen=True)
class OutputShard:
    """One output file."""

    file: str
    tensors: tuple[OutputTensor, ...]
    metadata: dict[str, str]
    whole_copy_of: int | None = None
    """The number of the source shard that this file equals byte for byte, if it does."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Plan:
    """What a conversion will do."""

    checkpoint: Checkpoint
    family: Family
    modeling: Modeling | None
    """The modelling file that the result brings along; None where stock classes load it."""
    home: Home | None
    """The stock model type that the source is translated to; None where it keeps its own."""
    groups: int
    method: Method
    seed: int
    heads: int
    source_kv_heads: int
    layers: tuple[AttentionLayer, ...]
    changes: tuple[TensorChange, ...]
    shards: tuple[OutputShard, ...]
    config: dict[str, Any]
    """The result's config.json."""
    warnings: tuple[str, ...]

    @property
    def effective_method(self) -> str:
        """What really happens: `copy` where no layer's count changes, `repeat` above it, else the method asked for."""
        methods = {change.method for change in self.changes} - {"copy"}
        return "copy" if not methods else "repeat" if methods == {"repeat"} else self.method

    @property
    def route(self) -> str:
        """What loads the result: stock classes of its own type (`native`) or of another that computes the same (`translated`), the
        modelling file that it brings (`own file`), or the source's own code."""
        if self.modeling:
            return "own file"
        if self.home:
            return "translated"
        return "native" if self.family.native or self.family.modeling else "checkpoint's own code"

    @property
    def loads_in(self) -> frozenset[str]:
        """Software that loads the result without custom code."""
        if self.modeling:
            return frozenset()
        if self.home:
            return engines_for(self.checkpoint.config, self.home)
        return frozenset({"transformers"}) if self.family.modeling else self.family.engines

    @property
    def weight_bytes_after(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def parameters_before(self) -> int:
        return sum(entry.elements for _, _, entry in self.checkpoint.tensors())

    @property
    def parameters_after(self) -> int:
        return sum(_count(tensor.shape) for shard in self.shards for tensor in shard.tensors)

    @property
    def disk_bytes(self) -> int:
        """What the result takes on disk, headers and carried files included, to within a few KiB."""
        headers = sum(len(tensor.name) + 120 for shard in self.shards for tensor in shard.tensors)
        return self.weight_bytes_after + headers + sum(self.checkpoint.sizes[name] for name in self.checkpoint.carried) + 65536

    def cache_bytes_per_token(self, after: bool, place: Place = "decoder") -> int:
        """K/V-cache bytes that one token takes over all attention layers of a place, in the type of the projections.

        A token of the text takes those of `decoder`, a token of an encoder's output those of `cross`.
        """
        return sum(
            (self.groups if after else layer.kv_heads)
            * (layer.key_width + layer.value_width)
            * DTYPES[layer.dtype].itemsize
            for layer in self.layers
            if layer.place == place
        )  # fmt: skip

    def cache_bytes(self) -> dict[str, dict[str, int]]:
        """The bytes before and after of each cache that there is."""
        places: dict[str, Place] = {"kv_bytes_per_token": "decoder", "cross_kv_bytes_per_encoder_token": "cross"}
        sizes = {
            key: {"before": self.cache_bytes_per_token(False, place), "after": self.cache_bytes_per_token(True, place)}
            for key, place in places.items()
        }
        return {key: both for key, both in sizes.items() if both["before"]}

    def tensor_parallel_degrees(self) -> tuple[list[int], list[int]]:
        """Degrees that split the K/V heads evenly, and further ones that engines reach by keeping copies of K/V heads."""
        degrees = [degree for degree in range(1, self.heads + 1) if self.heads % degree == 0]
        split = [degree for degree in degrees if self.groups % degree == 0]
        copied = [degree for degree in degrees if degree > self.groups and degree % self.groups == 0]
        return split, copied

    def summary(self) -> dict[str, Any]:
        """The plan as plain data for `--json`."""
        split, copied = self.tensor_parallel_degrees()
        return {
            "source": self.checkpoint.source_id,
            "revision": self.checkpoint.revision,
            "model_type": self.family.model_type,
            "weights_format": self.checkpoint.weights_format,
            "heads": self.heads,
            "source_kv_heads": self.source_kv_heads,
            "groups": self.groups,
            "method": self.effective_method,
            "attention_layers": len(self.layers),
            "changes": [
                {"name": c.name, "before": list(c.before), "after": list(c.after), "dtype": c.dtype, "method": c.method}
                for c in self.changes
            ],
            "parameters": {"before": self.parameters_before, "after": self.parameters_after},
            "weight_bytes": {"before": self.checkpoint.weight_bytes, "after": self.weight_bytes_after},
            **self.cache_bytes(),
            "disk_bytes": self.disk_bytes,
            "route": self.route,
            "result_model_type": self.config["model_type"],
            "modeling_file": f"{self.modeling.file}.py" if self.modeling else None,
            "loads_in": sorted(self.loads_in),
            "tensor_parallel": {"split": split, "with_copied_kv_heads": copied},
            "left_behind": list(self.checkpoint.left_behind),
            "warnings": list(self.warnings),
        }  # fmt: skip


def make_plan(
    checkpoint: Checkpoint, groups: int, *, method: str = "mean", seed: int = 0, encoder: bool = False, native: bool | None = None,
    max_shard_size: int | None = None,
) -> Plan:  # fmt: skip
    """Plan a conversion.

    Args:
        checkpoint: the opened source.
        groups: K/V heads per layer in the result (the paper's GQA-N).
        method: `mean`, `first` or `random`.
        seed: for `random`.
        encoder: convert an encoder's self-attention too, which keeps no cache; the paper leaves it as it is (section 2).
        native: for families whose own class has no K/V-head count: translate to a stock class that computes the same and has one, or
            (False) bring a modelling file; by default the former wherever there is such a class.
        max_shard_size: split the output anew into files of at most so many bytes of tensors; without it every input file has
            one output file of the same name.

    Raises:
        UnsupportedFamilyError: the model type is unknown or cannot be converted.
        ConfigError: the tensors' shapes contradict the config.
        GroupsError: `groups` does not fit the heads.
        UnsupportedFormatError: the K/V projections have a type that can't be merged.
        OptionError: an unknown method, an impossible shard size, no encoder to convert, or a route that there is not.
    """
    if method not in METHODS:
        raise OptionError(f"--method {method!r} is unknown: choose one of {', '.join(METHODS)}")
    if max_shard_size is not None and max_shard_size < 1:
        raise OptionError(f"--max-shard-size {max_shard_size} holds nothing: give it a size such as 5GB")
    chosen: Method = next(name for name in METHODS if name == method)
    family = find_family(checkpoint.config.get("model_type"))
    finder = AttentionFinder(checkpoint, family, encoder=encoder)
    for kv_heads, heads in dict.fromkeys((layer.kv_heads, layer.heads) for layer in finder.layers):
        _check_groups(groups, kv_heads, heads, family.model_type)
    home = _home(checkpoint, finder, groups, native)
    unchanged = all(layer.kv_heads == groups for layer in finder.layers)
    modeling = None if home or (unchanged and not _converted_before(family)) else family.modeling
    if home:
        shards, changes = _plan_translation(checkpoint, finder, home, groups, chosen)
        config = translate_config(checkpoint.config, home, groups)
    else:
        shards, changes = _plan_tensors(checkpoint, finder, groups, chosen)
        config = _converted_config(checkpoint.config, family, modeling, groups, encoder=encoder)
    if checkpoint.weights_format == "torch":
        shards = [replace(shard, file=_safetensors_name(shard.file), whole_copy_of=None) for shard in shards]
    if max_shard_size is not None:
        shards = _reshard(shards, max_shard_size)
    return Plan(
        checkpoint=checkpoint, family=family, modeling=modeling, home=home, groups=groups, method=chosen, seed=seed, heads=finder.heads,
        source_kv_heads=finder.kv_heads, layers=finder.layers, changes=tuple(changes), shards=tuple(shards), config=config,
        warnings=tuple(_warnings(checkpoint, family, modeling, home)),
    )  # fmt: skip


def _home(checkpoint: Checkpoint, finder: AttentionFinder, groups: int, native: bool | None) -> Home | None:
    """The stock model type to translate to, if that is the route to take."""
    family = finder.family
    if family.modeling is None and native is False:
        raise OptionError(f"--no-native: stock classes hold a {family.model_type} with fewer K/V heads as it is: leave it out")
    if family.modeling is None or native is False or (native is None and groups == finder.kv_heads):
        return None
    found = find_home(checkpoint.config, groups)
    if isinstance(found, NoHome):
        if native:
            raise OptionError(f"--native: this {family.model_type} has no native home: {found.reason}; leave it out, for a modelling file")
        return None
    return found


def _converted_before(family: Family) -> bool:
    """Whether the source is a result of ours, with a modelling file of its own already."""
    return family.modeling is not None and family.modeling.model_type == family.model_type


def _converted_config(config: dict[str, Any], family: Family, modeling: Modeling | None, groups: int, *, encoder: bool) -> dict[str, Any]:
    """The source's config with the family's own keys and ChatGLM2's convention set to the new count."""
    result = copy.deepcopy(config)
    if family.modeling is None or modeling is not None:  # stock classes of the other types know no such keys
        for dotted in family.kv_heads_keys:
            *parents, last = dotted.split(".")
            place = result
            for key in parents:
                place = place.setdefault(key, {})
            place[last] = groups
        if encoder:
            result[family.encoder_kv_heads_key] = groups
    result["multi_query_attention"] = True
    result["multi_query_group_num"] = groups
    if modeling is not None:
        names = [name for _, name in modeling.classes]
        stated = [f"GQA{name.removeprefix('GQA')}" for name in config.get("architectures") or ()]
        result["architectures"] = [name for name in stated if name in names] or [names[min(2, len(names) - 1)]]
        result["model_type"] = modeling.model_type
        kept = {auto: home for auto, home in config.get("auto_map", {}).items() if not auto.startswith(("AutoConfig", "AutoModel"))}
        result["auto_map"] = kept | modeling.auto_map
        if result.get("tokenizer_class") is None:
            result["tokenizer_class"] = modeling.tokenizer
    return result


def _check_groups(groups: int, kv_heads: int, heads: int, model_type: str) -> None:
    down = [count for count in range(1, kv_heads + 1) if kv_heads % count == 0]
    up = [count for count in range(2 * kv_heads, heads + 1, kv_heads) if heads % count == 0]
    if groups not in down and groups not in up:
        choices = ", ".join(map(str, down)) + (f"; or, to repeat heads for tensor parallelism, {', '.join(map(str, up))}" if up else "")
        raise GroupsError(
            f"--groups {groups} does not fit this {model_type} checkpoint with {kv_heads} K/V heads and {heads} query heads: choose one of {choices}"
        )


def _plan_tensors(
    checkpoint: Checkpoint, finder: AttentionFinder, groups: int, method: Method
) -> tuple[list[OutputShard], list[TensorChange]]:
    """Every output tensor in the order of its source, and the list of those that change."""
    homes = {name: (number, entry) for number, name, entry in checkpoint.tensors()}
    changed: set[str] = set()
    planned: dict[str, OutputTensor | None] = {}
    changes: list[TensorChange] = []
    for layer in finder.layers:
        for name, cut in finder.sections(layer):
            number, entry = homes[name]
            if groups == layer.kv_heads:
                output = _copied(name, number, entry)
            else:
                output = _regrouped(name, number, entry, cut, groups, method, transposed=finder.family.transposed and len(entry.shape) == 2)
                changed.add(name)
            planned[name] = output
            roles = tuple(section.role for section in cut if section.merged)
            changes.append(_change(name, layer, roles, entry, output.shape, groups, method))
        for names in finder.head_lists(layer):
            blocks = [(homes[name][0], homes[name][1].start) for name in names]
            entry = homes[names[0]][1]
            pieces = _regrouped_blocks(blocks, entry.nbytes, groups, _norm_method(method))
            changed.update(names if groups != layer.kv_heads else ())
            for index, name in enumerate(names):
                planned[name] = OutputTensor(name, entry.dtype, entry.shape, (pieces[index],)) if index < groups else None
            stem = names[0].rsplit(".0.", 1)[0]
            changes.append(
                _change(stem, layer, ("key_norm",), entry, (groups, *entry.shape), groups, method, before=(len(names), *entry.shape))
            )
            if groups > len(names):
                raise GroupsError(
                    f"{stem} has one tensor per K/V head, so that heads can't be repeated here: choose at most {len(names)} groups"
                )
    shards = []
    for number, shard in enumerate(checkpoint.shards):
        tensors = []
        for name, entry in shard.header.tensors.items():
            wanted = planned.get(name, _copied(name, number, entry))
            if wanted is not None:
                tensors.append(wanted)
        untouched = changed.isdisjoint(shard.header.tensors)
        shards.append(OutputShard(shard.file, tuple(tensors), dict(shard.header.metadata), number if untouched else None))
    return shards, changes


def _plan_translation(
    checkpoint: Checkpoint, finder: AttentionFinder, home: Home, groups: int, method: Method
) -> tuple[list[OutputShard], list[TensorChange]]:
    """Every tensor of the home, in the file of the source tensor that it comes from, and those whose heads become fewer."""
    homes = {name: (number, entry) for number, name, entry in checkpoint.tensors()}
    translation = translate_tensors(finder.entries, checkpoint.config, home, groups, method)
    tensors: list[list[OutputTensor]] = [[] for _ in checkpoint.shards]
    changes = []
    for tensor in translation.tensors:
        if tensor.merged:
            merged, module = tensor.merged, tensor.name.rsplit(".", 2)[0]
            changes.append(TensorChange(tensor.name, module, merged.roles, tensor.dtype, merged.before, merged.after, merged.method))
        tensors[homes[tensor.place][0]].append(_translated(tensor, homes))
    files = [shard for shard in checkpoint.shards if tensors[checkpoint.shards.index(shard)]]
    return [
        OutputShard(shard.file, tuple(tensors[checkpoint.shards.index(shard)]), dict(shard.header.metadata)) for shard in files
    ], changes


def _translated(tensor: TranslatedTensor, homes: dict[str, tuple[int, TensorEntry]]) -> OutputTensor:
    """Copies of rows travel like any others."""
    if tensor.copied_ranges is None:
        return OutputTensor(tensor.name, tensor.dtype, tensor.shape, (), translated=tensor)
    pieces = []
    for name, first, rows in tensor.copied_ranges:
        number, entry = homes[name]
        row_bytes = entry.nbytes // entry.shape[0]
        pieces.append(Piece(((number, entry.start + first * row_bytes),), rows * row_bytes))
    return OutputTensor(tensor.name, tensor.dtype, tensor.shape, tuple(pieces))


def _norm_method(method: Method) -> Method:
    """Gains of a norm are no projection: fresh numbers would only destroy them, so that `random` averages them."""
    return "mean" if method == "random" else method


def _change(
    name: str, layer: AttentionLayer, roles: tuple[Role, ...], entry: TensorEntry, after: tuple[int, ...], groups: int,
    method: Method, before: tuple[int, ...] | None = None,
) -> TensorChange:  # fmt: skip
    used: str = _norm_method(method) if roles == ("key_norm",) else method
    if groups >= layer.kv_heads:
        used = "copy" if groups == layer.kv_heads else "repeat"
    return TensorChange(name, layer.module, roles, entry.dtype, before or entry.shape, after, used)


def _copied(name: str, shard: int, entry: TensorEntry) -> OutputTensor:
    return OutputTensor(name, entry.dtype, entry.shape, (Piece(((shard, entry.start),), entry.nbytes),))


def _regrouped(
    name: str, shard: int, entry: TensorEntry, cut: tuple[Section, ...], groups: int, method: Method, *, transposed: bool
) -> OutputTensor:
    """The output tensor whose merged sections hold `groups` heads instead of the source's count, section behind section."""
    outer, axis = (entry.shape[0], 1) if transposed else (1, 0)
    unit = entry.nbytes // outer // entry.shape[axis]
    pieces: list[Piece] = []
    length = 0
    for section in cut:
        nbytes = section.width * unit
        blocks = [(shard, entry.start + start * unit) for start in section.starts]
        if section.merged:
            used = _norm_method(method) if section.role == "key_norm" else method
            pieces += _regrouped_blocks(blocks, nbytes, groups, used)
            length += groups * section.width
        else:
            pieces += _joined(blocks, nbytes)
            length += section.rows
    shape = (*entry.shape[:axis], length, *entry.shape[axis + 1 :])
    return OutputTensor(name, entry.dtype, shape, tuple(pieces), outer, entry.nbytes // outer if transposed else 0)


def _joined(blocks: list[tuple[int, int]], nbytes: int) -> Iterator[Piece]:
    """Copies of blocks of a shard; neighbours travel together."""
    shard, begin = blocks[0]
    for (_, block), following in zip(blocks, [start for _, start in blocks[1:]] + [-1], strict=True):
        if following != block + nbytes:
            yield Piece(((shard, begin),), block + nbytes - begin)
            begin = following


def _regrouped_blocks(blocks: list[tuple[int, int]], nbytes: int, groups: int, method: Method) -> list[Piece]:
    """One piece per group: contiguous heads share a group, as every native implementation has it."""
    if groups >= len(blocks):
        copies = groups // len(blocks)
        return [Piece((block,), nbytes) for block in blocks for _ in range(copies)]
    size = len(blocks) // groups
    return [Piece(tuple(blocks[first : first + size]), nbytes, method) for first in range(0, len(blocks), size)]


def _safetensors_name(file: str) -> str:
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def _reshard(shards: Iterable[OutputShard], limit: int) -> list[OutputShard]:
    """The same tensors in files of at most `limit` bytes of tensors; a larger tensor has a file of its own."""
    runs: list[list[OutputTensor]] = [[]]
    filled = 0
    metadata: dict[str, str] = {}
    for shard in shards:
        metadata |= shard.metadata
        for tensor in shard.tensors:
            if runs[-1] and filled + tensor.nbytes > limit:
                runs.append([])
                filled = 0
            runs[-1].append(tensor)
            filled += tensor.nbytes
    if len(runs) == 1:
        return [OutputShard("model.safetensors", tuple(runs[0]), metadata)]
    count = len(runs)
    return [OutputShard(f"model-{number:05d}-of-{count:05d}.safetensors", tuple(run), metadata) for number, run in enumerate(runs, 1)]


def _warnings(checkpoint: Checkpoint, family: Family, modeling: Modeling | None, home: Home | None) -> Iterator[str]:
    if checkpoint.left_behind:
        names = ", ".join(checkpoint.left_behind[:3]) + (" ..." if len(checkpoint.left_behind) > 3 else "")
        yield f"{len(checkpoint.left_behind)} file(s) with weights in other formats or training state are not carried over: {names}"
    if home and home.special_tokens and "tokenizer.json" not in checkpoint.carried and "vocab.json" in checkpoint.carried:
        yield f"transformers 5 loads a {home.model_type} tokenizer from tokenizer.json only, which is missing: save it with the tokenizer first"
    brings_code = any(name.endswith(".py") for name in checkpoint.carried) or "auto_map" in checkpoint.config
    if not family.native and not family.modeling:
        keys = ", ".join(family.kv_heads_keys)
        yield f"transformers loads it by the checkpoint's own code, which reads {keys}: that code is copied and never run here"
    elif brings_code and modeling is None:
        yield "the checkpoint brings Python code of its own: it is copied and never run; look whether it reads num_key_value_heads"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
