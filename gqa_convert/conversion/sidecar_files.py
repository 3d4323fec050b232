"""Writes the sidecar files of a result: index, config, tokenizer, modelling file."""

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.source import CONFIG, Checkpoint
from gqa_convert.checkpoint.strict_json import JsonObject
from gqa_convert.conversion.plan import Plan


def write_sidecar_files(plan: Plan, folder: Path) -> None:
    """Write the index, the config, the modelling file if one is needed, and a copy of every other file of the source,
    in which only the name of a tokenizer class may change.

    Args:
        plan: of a checkpoint on this machine.
        folder: where the result's weights are.
    """
    metadata = dict(plan.checkpoint.index_metadata or {})
    metadata["total_size"] = plan.weight_bytes_after
    metadata["total_parameters"] = plan.parameters_after
    write_index(folder, {file.file: file.names for file in plan.files}, metadata)
    own_code = plan.modeling.files if plan.modeling else ()
    for file in own_code:
        shutil.copyfile(file, folder / file.name)
        sync(folder / file.name)
    written = {PROVENANCE, *(file.name for file in own_code)}
    copy_files(plan.checkpoint, folder, [name for name in plan.checkpoint.carried if name not in written])
    name_tokenizer_for_all(folder / "tokenizer_config.json")
    write_json(folder / CONFIG, plan.config)


def copy_files(checkpoint: Checkpoint, folder: Path, names: Iterable[str]) -> None:
    """Copy and sync files of a checkpoint on this machine."""
    assert checkpoint.folder is not None
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint.folder / name, target)
        sync(target)


def write_index(folder: Path, files: Mapping[str, Collection[str]], metadata: JsonObject) -> None:
    """Write the index of weight files, unless there is only the one that needs none.

    Args:
        folder: where it goes.
        files: the names of the tensors in each file.
        metadata: of the index.
    """
    if list(files) == [formats.SAFETENSORS_SINGLE]:
        return
    weight_map = {name: file for file, names in files.items() for name in names}
    write_json(
        folder / formats.SAFETENSORS_INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    )


def name_tokenizer_for_all(path: Path) -> None:
    """Rename `TokenizersBackend`, which transformers 5 writes, to the class that all versions know."""
    try:
        stated = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(stated, dict) and stated.get("tokenizer_class") == "TokenizersBackend":
        write_json(path, stated | {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write and sync; piece by piece, since an index may name tens of thousands of tensors."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:  # as JSON writes half a surrogate pair
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
    sync(path)
