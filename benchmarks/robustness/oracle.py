"""What an accepted input must give, computed without the package."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from safetensors import SafetensorError, safe_open

GROUPS = 2

_FLOATS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_WRITTEN_KEYS = {"num_key_value_heads", "multi_query_attention", "multi_query_group_num"}

Raw = tuple[str, tuple[int, ...], bytes]


def conversion_mistake(source: Path, out: Path) -> str | None:
    """What is wrong with a mean-pooled result of a Llama; None if it is right."""
    try:
        before, after = _read(source), _read(out)
    except (SafetensorError, ValueError, KeyError, OSError) as problem:
        return f"the safetensors library cannot read it: {problem}"
    config = json.loads((source / "config.json").read_text(encoding="utf-8-sig"))
    result = json.loads((out / "config.json").read_text(encoding="utf-8"))
    changed = {key for key in config.keys() | result.keys() if repr(config.get(key)) != repr(result.get(key))}
    if extra := changed - _WRITTEN_KEYS:
        return f"config keys {sorted(extra)} differ"
    if result["num_key_value_heads"] != GROUPS:
        return f"the config states {result['num_key_value_heads']} K/V heads"
    if before.keys() != after.keys():
        return f"tensors {sorted(before.keys() ^ after.keys())} are in one of them only"
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] if config.get("num_key_value_heads") is not None else heads
    for name, tensor in before.items():
        merged = ".self_attn.k_proj." in name or ".self_attn.v_proj." in name
        mistake = _merge_mistake(tensor, after[name], kv_heads) if merged else _copy_mistake(tensor, after[name])
        if mistake is not None:
            return f"{name} {mistake}"
    return None


def _copy_mistake(before: Raw, after: Raw) -> str | None:
    return None if before == after else "is no copy"


def _merge_mistake(before: Raw, after: Raw, kv_heads: int) -> str | None:
    dtype, shape, raw = before
    if dtype not in _FLOATS or after[0] != dtype:
        return f"was merged from {dtype} to {after[0]}"
    numbers = np.frombuffer(raw, _FLOATS[dtype]).reshape(shape).astype(np.float64)
    heads = numbers.reshape(kv_heads, -1, *shape[1:])
    if GROUPS % kv_heads == 0:
        expected = np.repeat(heads, GROUPS // kv_heads, axis=0)
    else:
        expected = heads.reshape(GROUPS, kv_heads // GROUPS, *heads.shape[1:]).mean(axis=1)
    found = np.frombuffer(after[2], _FLOATS[dtype]).reshape(after[1]).astype(np.float64)
    expected = expected.reshape(-1, *shape[1:])
    if found.shape != expected.shape:
        return f"has the shape {found.shape}"
    rounding = {"F64": 1e-14, "F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}[dtype]
    return None if np.allclose(found, expected, rtol=rounding, atol=rounding) else "is not the mean of its heads"


def _read(folder: Path) -> dict[str, Raw]:
    """Every tensor that the folder's index, or its one file, names."""
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, str] | None = None
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
    found: dict[str, Raw] = {}
    for file in sorted(set(weight_map.values())) if weight_map is not None else ["model.safetensors"]:
        with safe_open(folder / file, "numpy"):  # the library's own checks
            pass
        content = (folder / file).read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        for name, entry in header.items():
            if name != "__metadata__" and (weight_map is None or weight_map.get(name) == file):
                start, stop = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), content[begin + start : begin + stop])
    if weight_map is not None and found.keys() != weight_map.keys():
        raise KeyError(f"the index names {sorted(found.keys() ^ weight_map.keys())} wrongly")
    return found


def token_count(path: Path) -> int:
    """How many tokens a file has where each byte is one, and each document ends with one more."""
    if path.suffix == ".parquet":
        documents = [text for text in pq.read_table(path, columns=["text"])["text"].to_pylist() if text]
    else:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        elif path.suffix == ".zst":
            raw = pa.CompressedInputStream(pa.BufferReader(raw), "zstd").read()
        documents = _documents(raw.decode("utf-8-sig"), ".json" in path.name)
    return sum(len(_without_surrogates(document).encode()) + 1 for document in documents)


def _without_surrogates(text: str) -> str:
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _documents(text: str, is_json: bool) -> list[str]:
    if not is_json:
        return [text] if text else []
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    return [row["text"] for row in rows if row["text"]]


def recipe_mistake(raw: bytes, resolved: dict[str, Any]) -> str | None:
    """Whether a key of a recipe that was accepted has another value than its text says."""
    stated = yaml.load(raw.decode("utf-8-sig"), yaml.BaseLoader)
    for key, value in stated.items():
        if key not in resolved:
            return f"the key {key} was dropped"
        if isinstance(value, str) and not _same(value, resolved[key]):
            return f"{key} is {value!r} and was read as {resolved[key]!r}"
    return None


def _same(text: str, value: Any) -> bool:
    if value is None:
        return text.lower() in ("", "~", "null")
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        return abs(_number(text) - value) <= 0.5 if isinstance(value, int) else _number(text) == value
    if isinstance(value, list | tuple):
        return _same(text, value[0]) if len(value) == 1 else False
    if isinstance(value, dict):
        return _same(text, value["source"])
    return text == str(value)


def _number(text: str) -> float:
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "G": 1e9}.get(text.strip()[-1:], 1)
    return float(text.strip().rstrip("kMBTG").replace(",", "").replace("_", "")) * factor
