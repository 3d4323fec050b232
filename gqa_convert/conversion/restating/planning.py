"""From the headers of a checkpoint with custom code to the files of the stock checkpoint: where every byte comes
from.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gqa_convert.checkpoint.files import links_note
from gqa_convert.checkpoint.headers import TensorEntry
from gqa_convert.checkpoint.item_bytes import ITEM_BYTES
from gqa_convert.checkpoint.source import Checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan.tensors import safetensors_name
from gqa_convert.conversion.restating.piece_tensors import PieceTensor
from gqa_convert.conversion.restating.pieces import PieceFile
from gqa_convert.conversion.restating.remote_code_types import RESTATED, Module, Restated
from gqa_convert.errors import ConfigError, UnsupportedFamilyError, UnsupportedFormatError
from gqa_convert.families import layouts
from gqa_convert.families.table import find_family

_OWN_CODE = ("modeling_", "configuration_")
"""What the names of Python files begin with that the stock checkpoint does not need. A tokenizer's stay."""

_HEADERS_SIZE: Final = 65536


@dataclass(frozen=True)
class StockPlan:
    """What `restate_checkpoint` writes."""

    checkpoint: Checkpoint
    record: Restated
    files: tuple[PieceFile, ...]
    config: JsonObject
    notes: tuple[str, ...]
    target_architecture: None = None
    modeling: None = None

    def tensors(self, file: PieceFile) -> tuple[PieceTensor, ...]:
        return file.tensors

    @property
    def weight_bytes_after(self) -> int:
        return sum(tensor.nbytes for shard in self.files for tensor in shard.tensors)

    @property
    def parameters_after(self) -> int:
        return sum(tensor.elements for shard in self.files for tensor in shard.tensors)

    @property
    def disk_bytes(self) -> int:
        headers = sum(len(tensor.name) + 120 for shard in self.files for tensor in shard.tensors)
        return (
            self.weight_bytes_after
            + headers
            + sum(self.checkpoint.sizes[name] for name in self.checkpoint.carried)
            + _HEADERS_SIZE
        )


def plan_stock(checkpoint: Checkpoint) -> StockPlan:
    """Plan how a checkpoint with custom code becomes one of a stock type.

    Args:
        checkpoint: the opened source. Of its own code only a class name is looked for; none of it runs.

    Raises:
        UnsupportedFamilyError: no stock class computes the same.
        ConfigError: the tensors do not belong to the config.
        UnsupportedFormatError: the tensors have a type that is needed in numbers and can't be.
    """
    config = checkpoint.config
    model_type = config.get("model_type")
    record = RESTATED.get(model_type) if isinstance(model_type, str) else None
    if record is None:
        find_family(model_type)  # a type that is refused has a better explanation
        raise UnsupportedFamilyError(f"model type {model_type} loads without custom code: convert it directly")
    names = dict(record.classes)
    architectures = config.get("architectures") or [record.classes[0][0]]
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in names:
        raise UnsupportedFamilyError(
            f"only a language model ({' or '.join(names)}) of type {model_type} can be rewritten, and config.json names {architectures!r}"
        )
    stock = record.config(config) | {"model_type": record.stock, "architectures": [names[architectures[0]]]}
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str):
        stock |= {"dtype": dtype, "torch_dtype": dtype}
    auto = {
        key: value
        for key, value in (config.get("auto_map") or {}).items()
        if not key.startswith(("AutoConfig", "AutoModel"))
    }
    if auto:
        stock["auto_map"] = auto
    carried = tuple(
        name for name in checkpoint.carried if not (name.endswith(".py") and Path(name).name.startswith(_OWN_CODE))
    )
    kept = replace(checkpoint, carried=carried)
    if record.inside:
        restater = _Restater(checkpoint, record, stock, unit_head=_has_unit_head(checkpoint, record))
        shards, biased = restater.shards(), restater.biased
        if record.bias_key:
            stock[record.bias_key] = bool(biased)
    else:
        shards = [
            PieceFile(
                shard.file,
                tuple(_whole(name, number, entry) for name, entry in shard.header.tensors.items()),
                dict(shard.header.metadata),
                None if checkpoint.weights_format == "torch" else number,
            )
            for number, shard in enumerate(checkpoint.shards)
        ]
    if checkpoint.weights_format == "torch":
        shards = [replace(shard, file=safetensors_name(shard.file)) for shard in shards]
    return StockPlan(kept, record, tuple(shards), stock, tuple(_notes(checkpoint, record)))


def _notes(checkpoint: Checkpoint, record: Restated) -> list[str]:
    notes = []
    if checkpoint.left_behind:
        notes.append(f"{len(checkpoint.left_behind)} file(s) with weights in other formats are not carried over")
    notes += links_note(checkpoint.links_out)
    if record.alike_up_to:
        tokens = checkpoint.config.get(record.alike_up_to)
        if isinstance(tokens, int):
            notes.append(
                f"the same up to {tokens:,} tokens; beyond them its custom code scales positions by the length of the text"
            )
    return notes


def _has_unit_head(checkpoint: Checkpoint, record: Restated) -> bool:
    """Whether the source's code scales the rows of its output projection: its text says so, or else the size of the
    vocabulary.
    """
    if record.unit_head is None:
        return False
    name, vocabulary = record.unit_head
    files = [file for file in checkpoint.carried if Path(file).name.startswith("modeling_") and file.endswith(".py")]
    if files and checkpoint.folder is not None:
        return any(name in (checkpoint.folder / file).read_text(encoding="utf-8", errors="replace") for file in files)
    return checkpoint.config.get("vocab_size") == vocabulary


def _whole(name: str, number: int, entry: TensorEntry) -> PieceTensor:
    return PieceTensor(name, entry.dtype, entry.shape, ((number, entry.start, entry.nbytes),))


class _Restater:
    """Finds every tensor of the stock class among those of the source. A tensor left over is an error."""

    def __init__(self, checkpoint: Checkpoint, record: Restated, stock: JsonObject, *, unit_head: bool) -> None:
        self.record, self.stock, self.unit_head = record, stock, unit_head
        self.checkpoint = checkpoint
        self.entries = {name: (number, entry) for number, name, entry in checkpoint.tensors()}
        self.claimed: set[str] = set()
        self.outputs: dict[str, list[PieceTensor]] = {}
        """The tensors of the result by the source tensor that they come from."""
        self.biased = self._attention_biased()

    def shards(self) -> list[PieceFile]:
        record = self.record
        head = record.outside[-1]
        for module in record.outside:
            own = self._own(module, "")
            if module is head and own is None and self.stock.get("tie_word_embeddings"):
                continue
            self._module(module, "", "", unit=module is head and self.unit_head)
        for layer in range(self.stock["num_hidden_layers"]):
            own_base, stock_base = (f"{prefix}.{layer}." for prefix in record.layers)
            for module in record.inside:
                self._module(module, own_base, stock_base)
            if record.fused:
                self._fused(record.fused, own_base, stock_base)
        for name in self.entries:
            if name not in self.claimed and not name.endswith(record.stale):
                raise ConfigError(
                    f"tensor {name} is none that a {record.model_type} with {self.stock['num_hidden_layers']} layers has: "
                    "the config and the weights do not belong together"
                )
        return [
            PieceFile(
                shard.file,
                tuple(out for name in shard.header.tensors for out in self.outputs.get(name, ())),
                dict(shard.header.metadata),
            )
            for shard in self.checkpoint.shards
            if any(name in self.outputs for name in shard.header.tensors)
        ]

    def _attention_biased(self) -> bool:
        """Whether any module that may have a bias has one; then all must."""
        record = self.record
        modules = [*record.inside, *([record.fused] if record.fused else [])]
        names = [
            f"{record.layers[0]}.0.{own}.bias" for module in modules if module.bias == "attention" for own in module.own
        ]
        return any(name in self.entries for name in names)

    def _own(self, module: Module, base: str) -> str | None:
        return next((own for own in module.own if f"{base}{own}.weight" in self.entries), None)

    def _kinds(self, module: Module) -> tuple[str, ...]:
        biased = module.bias == "always" or (module.bias == "attention" and self.biased)
        return ("weight", "bias") if biased else ("weight",)

    def _claim(self, name: str) -> tuple[int, TensorEntry]:
        if name not in self.entries:
            raise ConfigError(
                f"tensor {name} is missing: the checkpoint is incomplete, or its config.json is that of another"
            )
        self.claimed.add(name)
        return self.entries[name]

    def _module(self, module: Module, own_base: str, stock_base: str, *, unit: bool = False) -> None:
        own = self._own(module, own_base) or module.own[0]
        for kind in self._kinds(module):
            name = f"{own_base}{own}.{kind}"
            number, entry = self._claim(name)
            if unit:
                self._check_numbers(name, entry)
            output = _whole(f"{stock_base}{module.stock}.{kind}", number, entry)
            self.outputs.setdefault(name, []).append(replace(output, unit_rows=unit))

    def _check_numbers(self, name: str, entry: TensorEntry) -> None:
        if entry.dtype not in ITEM_BYTES or len(entry.shape) != 2:
            raise UnsupportedFormatError(
                f"{name} has type {entry.dtype}, which has no arithmetic here: save the model in one float type"
            )

    def _fused(self, module: Module, own_base: str, stock_base: str) -> None:
        """Queries, keys and values are cut out of the projection that holds them all."""
        stock = self.stock
        heads, kv_heads, hidden = (stock[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
        width = hidden // heads
        cut = layouts.fused(self.record.fused_layout, heads, kv_heads, width)
        rows = sum(section.rows for section in cut)
        for kind in self._kinds(module):
            name = f"{own_base}{module.own[0]}.{kind}"
            number, entry = self._claim(name)
            columns = (hidden,) if kind == "weight" else ()
            if entry.shape != (rows, *columns):
                raise ConfigError(
                    f"tensor {name} has shape {list(entry.shape)} where {[rows, *columns]} belongs for {heads} query heads and {kv_heads} "
                    f"K/V heads of head_dim {width}: the config and the weights do not belong together"
                )
            row_bytes = entry.nbytes // rows
            for section, part in zip(cut, ("q_proj", "k_proj", "v_proj"), strict=True):
                pieces = tuple((number, entry.start + start * row_bytes, width * row_bytes) for start in section.starts)
                shape = (section.rows, *columns)
                output = PieceTensor(f"{stock_base}{module.stock}.{part}.{kind}", entry.dtype, shape, pieces)
                self.outputs.setdefault(name, []).append(output)
