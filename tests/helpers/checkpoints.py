"""Small Llama checkpoints written with numpy and safetensors alone, and ways to compare folders. No
two counts coincide.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GQAConvertError

HEADS, WIDTH, HIDDEN, INNER, VOCABULARY = 12, 8, 60, 56, 24

CONFIG: dict[str, Any] = json.loads(Path(__file__).with_name("llama_config.json").read_text())

Arrays = dict[str, np.ndarray[Any, Any]]


def llama_arrays(layers: int = 2, hidden: int = HIDDEN, seed: int = 0) -> Arrays:
    """Return the tensors of a Llama model in float32."""
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        shapes |= {
            f"{stem}.self_attn.{name}_proj.weight": (HEADS * WIDTH, hidden) for name in "qkv"
        }
        shapes |= {
            f"{stem}.self_attn.o_proj.weight": (hidden, HEADS * WIDTH),
            f"{stem}.mlp.down_proj.weight": (hidden, INNER),
        }
        shapes |= {f"{stem}.mlp.{name}_proj.weight": (INNER, hidden) for name in ("gate", "up")}
        shapes |= {
            f"{stem}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_llama(
    folder: Path,
    *,
    arrays: Arrays | None = None,
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder with the layout of save_pretrained."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = llama_arrays() if arrays is None else arrays
    write_config(folder, **(config or {}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    if shards == 1:
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number, names in enumerate(split(list(arrays), shards), 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({name: arrays[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(array.nbytes for array in arrays.values())
    write_index(folder / "model.safetensors.index.json", weight_map, total)
    return folder


def split(names: list[str], parts: int) -> list[list[str]]:
    """Cut `names` into `parts` runs of nearly equal length."""
    return [list(run) for run in np.array_split(np.array(names, dtype=object), parts)]


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes, indent=2))


def write_index(path: Path, weight_map: dict[str, Any], total: int = 0) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def read_weights(folder: Path) -> Arrays:
    """Return all tensors of a folder's safetensors files."""
    return {
        name: array
        for path in sorted(folder.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def same_weights(left: Path, right: Path) -> bool:
    """Whether two folders hold the same tensors, in the same types."""
    ours, theirs = read_weights(left), read_weights(right)
    if ours.keys() != theirs.keys():
        return False
    pairs = [(ours[name], theirs[name]) for name in ours]
    return all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in pairs)


def digests(folder: Path, *, ignore: tuple[str, ...] = ("gqa_conversion.json",)) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder, hidden files included."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ignore
    }


def by_mean(source: Path, out: Path, groups: int = 4, **options: Any) -> Any:
    """Convert by pooling, with further options."""
    return convert_checkpoint(source, out, groups, ConversionOptions(method="mean", **options))


@contextlib.contextmanager
def refused(
    kind: type[GQAConvertError], *words: str
) -> Iterator[pytest.ExceptionInfo[GQAConvertError]]:
    """A context that must end with an error of this kind, in one line that holds all the words."""
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.isprintable()
    for word in words:
        assert word in message
