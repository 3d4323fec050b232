"""Writes the sidecar files of a result: index, config, tokenizer, modelling file."""

import json
import shutil
from pathlib import Path
from typing import Any

from gqa_convert.checkpoint import formats
from gqa_convert.checkpoint.atomic_files import sync
from gqa_convert.checkpoint.provenance import PROVENANCE
from gqa_convert.checkpoint.source import CONFIG
from gqa_convert.conversion.plan import Plan


def write_sidecar_files(plan: Plan, folder: Path) -> None:
    """Write the index, the config, the modelling file if one is needed, and a copy of every other file of the source,
    in which only the name of a tokenizer class may change.

    Args:
        plan: of a checkpoint on this machine.
        folder: where the result's weights are.
    """
    _write_index(plan, folder)
    source = plan.checkpoint.folder
    assert source is not None
    own = f"{plan.modeling.file}.py" if plan.modeling else ""
    if plan.modeling:
        shutil.copyfile(plan.modeling.path, folder / own)
        sync(folder / own)
    for name in plan.checkpoint.carried:
        if name in (PROVENANCE, own):
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target)
        sync(target)
    name_tokenizer_for_all(folder / "tokenizer_config.json")
    write_json(folder / CONFIG, plan.config)


def _write_index(plan: Plan, folder: Path) -> None:
    """The index of a sharded result; its totals are those of the new tensors."""
    if len(plan.files) == 1 and plan.files[0].file == formats.SAFETENSORS_SINGLE:
        return
    metadata = dict(plan.checkpoint.index_metadata or {})
    metadata["total_size"] = plan.weight_bytes_after
    metadata["total_parameters"] = plan.parameters_after
    weight_map = {name: file.file for file in plan.files for name in file.names}
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
